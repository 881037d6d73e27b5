// The LM head where only the most likely tokens matter: products with weights of 8 bits, half as many bytes, tell which
// tiles of 32 tokens may have them, and only the products of these tiles are computed.
//
// Let w = s q + e be a row of the weights and q its codes. |w x - s q x| is at most |e| |x| (Cauchy-Schwarz) plus what
// rounding adds: each of the two sums of n products, in float32, is off by at most n 2^-24 |w| |x|. So each product has a
// lower and an upper limit. The smallest of the k largest products of a row is no less than the k-th largest of the tiles'
// largest lower limits, and a tile whose upper limits are all below that has none of the k. Its products stay as the codes
// gave them, which are below the k largest too. The products of the other tiles are the same numbers as without codes.

#include "calls.h"
#include "expanded_formats.h"
#include "team.h"
#include "vectors.h"

#include <functional>
#include <limits>
#include <vector>

namespace screened {

using expanded::Bfloat16;
using expanded::Float16;
using expanded::FromHalves;
using expanded::LaneIntegers;
using float32::LANES;
using float32::Lanes;
using float32::TILE;

// Multiplying the codes of more rows takes as long as reading the weights.
#if defined(HAS_AMX)
constexpr int64_t MOST_ROWS = 4;
#elif defined(__AVX512VBMI__) && defined(__AVX512BF16__)
constexpr int64_t MOST_ROWS = 3;
#else
constexpr int64_t MOST_ROWS = 2;
#endif
constexpr int64_t GATHERED = 64;       // tiles that are computed at once
constexpr int64_t SHARE = 8;           // of so many tiles one, at most, is worth computing apart
constexpr int64_t LONGEST_PAUSE = 256;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LARGEST_CODE = 127.0f;
// Sums of squares of smaller numbers lose them: rows whose largest weight is below it become zeros, and shorter inputs have
// all products computed.
constexpr float LEAST = 0x1p-40f;
constexpr float MAGIC = 0x1.8p23f;     // added and subtracted it rounds to integers
constexpr float SLACK = 1.0f + 0x1p-6f;  // for the rounding of the limits themselves

// Memory of one thread that calls `linear_screened`, for the threads of its team.
struct Memory {
    std::vector<float> low, high, ranked;  // limits of tiles, (rows, tiles)
    std::vector<int64_t> tiles;            // that may have one of the largest products
    std::vector<char> weights, y;          // of GATHERED tiles
    std::vector<float> bias;
};

static int64_t tile_bytes(const ScreenedLinear& s) { return TILE * s.inputs * int64_t(sizeof(uint16_t)); }

// y (rows, outputs) of tiles of the weights.
static void multiply(int64_t type, const ScreenedLinear& s, const void* weight, const float* bias, int64_t outputs,
                     void* y) {
#if defined(__AVX512BW__)
    if (s.by_products) {
        const Linear l{(const bfloat16*)s.x, weight,  nullptr, bias, (bfloat16*)y, nullptr, nullptr,
                       s.rows,               s.inputs, outputs, 0};
        return linear_bfloat16(&l);
    }
#endif
    const ExpandedLinear l{s.x,      weight,  nullptr,  bias,     nullptr,     y,    s.rows,
                           s.inputs, outputs, s.inputs, s.format, AS_THEY_ARE, 1.0f, 1.0f};
    linear_expanded(type, &l);
}

// y (rows, outputs) of the codes.
static void multiply_codes(int64_t type, const ScreenedLinear& s) {
    const ExpandedLinear l{s.x,      s.codes,   s.scales, s.bias,  nullptr,     s.y,  s.rows,
                           s.inputs, s.outputs, s.inputs, OF_INT8, AS_THEY_ARE, 1.0f, 1.0f};
    linear_expanded(type, &l);
}

template <typename T>
static float norm_of(const T* x, int64_t inputs) {
    Vector squares = {};
    int64_t i = 0;
    for (; i + WIDTH <= inputs; i += WIDTH) {
        const Vector v = load(x + i);
        squares += v * v;
    }
    float sum = 0.0f;
    for (; i < inputs; ++i) sum += to_float(x[i]) * to_float(x[i]);
    for (int64_t lane = 0; lane < WIDTH; ++lane) sum += squares[lane];
    return std::sqrt(sum);
}

// The largest limits of a tile's products `y`. These and the exact ones are both rounded to T, each by half a unit of the
// last place. Products whose errors are no numbers do not count.
template <typename T>
static void limit(const T* y, const float* errors, float norm, float& low, float& high) {
    constexpr float ROUNDING = std::is_same_v<T, float> ? 0x1p-23f : 0x1p-7f;
    Vector lows = Vector() - INFINITE, highs = lows;
    for (int64_t o = 0; o < TILE; o += WIDTH) {
        const Vector v = load(y + o), most = (load(errors + o) * norm + absolute(v) * ROUNDING) * SLACK;
        lows = v - most > lows ? v - most : lows;
        highs = v + most > highs ? v + most : highs;
    }
    low = high = -INFINITE;
    for (int64_t lane = 0; lane < WIDTH; ++lane) {
        low = std::max(low, lows[lane]);
        high = std::max(high, highs[lane]);
    }
}

// Finds the tiles that may have one of the `most` largest products of a row; false if that cannot be told.
template <typename T>
static bool find_tiles(const ScreenedLinear& s, int64_t most, Memory& memory) {
    const int64_t tiles = s.outputs / TILE;
    float* low = at_least(memory.low, s.rows * tiles);
    float* high = at_least(memory.high, s.rows * tiles);
    float norms[MOST_ROWS];
    for (int64_t row = 0; row < s.rows; ++row) {
        norms[row] = norm_of((const T*)s.x + row * s.inputs, s.inputs);
        if (!(norms[row] >= LEAST && norms[row] < INFINITE)) return false;
    }
    team::for_each(tiles, s.rows * s.outputs >= PARALLEL_FROM, [&](int64_t tile) {
        for (int64_t row = 0; row < s.rows; ++row) {
            const int64_t at = row * tiles + tile;
            limit((const T*)s.y + row * s.outputs + tile * TILE, s.errors + tile * TILE, norms[row], low[at], high[at]);
        }
    });
    float least[MOST_ROWS];
    for (int64_t row = 0; row < s.rows; ++row) {
        float* ranked = at_least(memory.ranked, tiles);
        std::copy_n(low + row * tiles, tiles, ranked);
        float* last = ranked + std::min(most, tiles) - 1;
        std::nth_element(ranked, last, ranked + tiles, std::greater<float>());
        if (!(std::fabs(*last) < INFINITE)) return false;
        least[row] = *last;
    }
    memory.tiles.clear();
    for (int64_t tile = 0; tile < tiles; ++tile) {
        bool may = false;
        for (int64_t row = 0; row < s.rows; ++row) may |= high[row * tiles + tile] >= least[row];
        if (may) memory.tiles.push_back(tile);
    }
    return int64_t(memory.tiles.size()) * SHARE <= tiles;
}

// Replaces the products of these tiles, up to GATHERED, by those of the weights.
template <typename T>
static void compute_tiles(int64_t type, const ScreenedLinear& s, const int64_t* tiles, int64_t count, Memory& memory) {
    const int64_t bytes = tile_bytes(s);
    char* weights = at_least_aligned(memory.weights, count * bytes);
    T* y = (T*)at_least_aligned(memory.y, s.rows * count * TILE * int64_t(sizeof(T)));
    float* bias = s.bias ? at_least(memory.bias, count * TILE) : nullptr;
    team::for_each(count, count > 1, [&](int64_t i) {
        std::memcpy(weights + i * bytes, (const char*)s.weight + tiles[i] * bytes, size_t(bytes));
        if (bias) std::copy_n(s.bias + tiles[i] * TILE, TILE, bias + i * TILE);
    });
    multiply(type, s, weights, bias, count * TILE, y);
    for (int64_t row = 0; row < s.rows; ++row)
        for (int64_t i = 0; i < count; ++i)
            std::copy_n(y + (row * count + i) * TILE, TILE, (T*)s.y + row * s.outputs + tiles[i] * TILE);
}

// Whether the largest products could be told from others by their codes.
template <typename T>
static bool compute_largest(int64_t type, const ScreenedLinear& s) {
    static thread_local Memory memory;
    multiply_codes(type, s);
    if (!find_tiles<T>(s, *s.most, memory)) return false;
    const int64_t count = int64_t(memory.tiles.size());
    for (int64_t i = 0; i < count; i += GATHERED)
        compute_tiles<T>(type, s, memory.tiles.data() + i, std::min(GATHERED, count - i), memory);
    return true;
}

// `pause`: products that are still computed whole, because codes could not tell the largest ones, and how many the last
// pause had.
EXPORT void linear_screened(int64_t type, const ScreenedLinear* s) {
    if (s->rows == 0) return;
    if (*s->most > 0 && s->rows <= MOST_ROWS) {
        if (s->pause[0] > 0) {
            --s->pause[0];
        } else if (type == FLOAT32 ? compute_largest<float>(type, *s) : compute_largest<bfloat16>(type, *s)) {
            s->pause[1] = 0;
            return;
        } else {
            s->pause[0] = s->pause[1] = std::min(LONGEST_PAUSE, 2 * s->pause[1] + 1);
        }
    }
    multiply(type, *s, s->weight, s->bias, s->outputs, s->y);
}

static inline Lanes sizes(Lanes v) { return (Lanes)((LaneIntegers)v & 0x7fffffff); }

// A tile's weights of `inputs` inputs as codes, which expanded_formats.h describes, times `scales`; `errors`: how far a
// product of the codes may be from that of the weights, for each unit of the length of x.
template <class Number>
static void screen_tile(const uint32_t* weight, int64_t inputs, uint32_t* codes, float* scales, float* errors) {
    using Format = FromHalves<Number>;
    constexpr int64_t COUNT = TILE / LANES;
    Lanes largest[COUNT] = {}, squares[COUNT] = {}, lost[COUNT] = {}, factors[COUNT], steps[COUNT];
    const auto words_of = [&](int64_t input) { return weight + input / Format::INPUTS * Format::WORDS; };
    for (int64_t i = 0; i < inputs; i += Format::INPUTS)
        Format::expand(words_of(i), [&](int64_t, int64_t o, Lanes v) __attribute__((always_inline)) {
            const Lanes size = sizes(v);
            largest[o / LANES] = largest[o / LANES] > size ? largest[o / LANES] : size;
            squares[o / LANES] += v * v;
        });
    for (int64_t k = 0; k < COUNT; ++k) {
        const Lanes zero = {};
        steps[k] = largest[k] >= LEAST ? largest[k] / LARGEST_CODE : zero;
        factors[k] = largest[k] >= LEAST ? LARGEST_CODE / largest[k] : zero;
    }
    for (int64_t i = 0; i < inputs; i += 4) {
        LaneIntegers four[COUNT] = {};
        for (int64_t half = 0; half < 4; half += Format::INPUTS)
            Format::expand(words_of(i + half), [&](int64_t n, int64_t o, Lanes v) __attribute__((always_inline)) {
                const int64_t k = o / LANES;
                const Lanes code = (v * factors[k] + MAGIC) - MAGIC, error = v - code * steps[k];
                lost[k] += error * error;
                four[k] |= (__builtin_convertvector(code, LaneIntegers) & 0xff) << (8 * int32_t(half + n));
            });
        for (int64_t k = 0; k < COUNT; ++k)
            *(LaneIntegers*)(codes + i / 4 * TILE + k * LANES) = four[k];
    }
    const float rounding = float(inputs) * 0x1p-23f;
    for (int64_t o = 0; o < TILE; ++o) {
        const float most = largest[o / LANES][o % LANES], step = steps[o / LANES][o % LANES];
        const float longest = most * std::sqrt(float(inputs)), square = squares[o / LANES][o % LANES];
        const float size = step > 0.0f ? std::sqrt(square) : longest;
        const float error = step > 0.0f ? std::sqrt(lost[o / LANES][o % LANES]) : longest;
        const bool finite = square < INFINITE;
        scales[o] = finite ? step : 0.0f;
        errors[o] = finite ? error + rounding * (error + size) : INFINITE;
    }
}

// Makes of weights (outputs, inputs), packed in `format`, what `ScreenedLinear` takes beside them. Inputs are multiples
// of 4.
EXPORT void screen(int64_t format, const void* weight, void* codes, float* scales, float* errors, int64_t inputs,
                   int64_t outputs) {
    team::for_each(outputs / TILE, true, [&](int64_t tile) {
        const auto* from = (const uint32_t*)weight + tile * inputs / 2 * TILE;
        auto* into = (uint32_t*)codes + tile * inputs / 4 * TILE;
        const int64_t first = tile * TILE;
        format == OF_FLOAT16 ? screen_tile<Float16>(from, inputs, into, scales + first, errors + first)
                             : screen_tile<Bfloat16>(from, inputs, into, scales + first, errors + first);
    });
}

}  // namespace screened
