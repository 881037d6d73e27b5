// The LM head when only the most likely tokens matter: products with 8-bit weights, half as many bytes, show which tiles of 32
// tokens may contain them, and only the outputs of these tiles are computed exactly.
//
// Let w = s q + e be a row of the weights and q its codes. |w x - s q x| is at most |e| |x| (Cauchy-Schwarz) plus the rounding
// error: each of the two float32 sums of n products is off by at most n 2^-24 |w| |x|. So each output has a lower and an upper
// bound. The k-th largest output of a row is at least the k-th largest of the tiles' largest lower bounds, so a tile whose
// upper bounds are all below that contains none of the k largest. Its outputs remain those of the codes, which are below the k
// largest, too. The outputs of all other tiles are the same as without codes.
//
// A token drawn from all tokens is the one with the largest logit + noise (gumbel.h): the noise is added to both bounds, and k
// is 1. If only tokens near the largest logit may be drawn, k is 1, too, and a tile is kept unless its upper bounds are below
// the lower bound of the largest logit by more than that distance.

#include "calls.h"
#include "expanded_formats.h"
#include "gumbel.h"
#include "team.h"
#include "vectors.h"

#include <functional>
#include <limits>
#include <vector>

namespace screened {

using expanded::Bfloat16;
using expanded::expand_inputs;
using expanded::Float16;
using expanded::FromHalves;
using expanded::LaneIntegers;
using float32::LANES;
using float32::Lanes;
using float32::TILE;

// With more rows, multiplying the codes takes as long as reading the weights.
#if defined(HAS_AMX)
constexpr int64_t MOST_ROWS = 4;
#elif defined(__AVX512VBMI__) && defined(__AVX512BF16__)
constexpr int64_t MOST_ROWS = 3;
#else
constexpr int64_t MOST_ROWS = 2;
#endif
constexpr int64_t GATHERED = 64;       // tiles that are computed at once
constexpr int64_t CHUNK = 64;          // consecutive tiles whose bounds one thread computes
constexpr int64_t SHARE = 8;           // screening pays off if at most one in SHARE tiles must be computed
constexpr int64_t LONGEST_PAUSE = 256;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LARGEST_CODE = 127.0f;
// Sums of squares of smaller numbers may underflow. Rows of weights whose amax is smaller get zero codes; for inputs whose norm
// is smaller, all outputs are computed exactly.
constexpr float LEAST = 0x1p-40f;
constexpr float MAGIC = 0x1.8p23f;     // adding and subtracting it rounds to integers
constexpr float SLACK = 1.0f + 0x1p-6f;  // for rounding errors of the bounds themselves
constexpr float ROUNDED = 0x1p-16f;      // relative error of scaling logits and comparing them in float32

// Scratch memory of a thread that calls `linear_screened`, shared by its worker threads.
struct Memory {
    std::vector<float> low, high, ranked;  // bounds of tiles, (rows, tiles)
    std::vector<int64_t> tiles;            // tiles that may contain one of the largest outputs
    std::vector<char> weights, y;          // of GATHERED tiles
    std::vector<float> bias;
};

static int64_t tile_bytes(const ScreenedLinear& s) { return TILE * s.inputs * int64_t(sizeof(uint16_t)); }

// y (rows, outputs) with the 16-bit weights `weight`.
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

// y (rows, outputs) with the codes.
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

// How the outputs of one row are compared: directly if `factor` is 0, else after adding noise. `norm`: the norm of the row's
// inputs.
struct Measure {
    float norm, factor;
    Gumbel gumbel;
};

// The largest lower and the largest upper bound in a tile; both -INFINITE if the tile has no valid output.
struct Limits {
    float low = -INFINITE, high = -INFINITE;
};

// Lower and upper bounds of outputs, without or with noise.
struct Range {
    Vector low, high;
};

// Adds noise to the bounds of a tile's outputs, for tokens from `first` on. Returns false and changes nothing if all sums would
// be below `best`; the quantiles show that for most tiles, whose noise is then not computed.
static bool add_noise(Range (&ranges)[TILE / WIDTH], const Measure& by, int64_t first, float best) {
    Words tokens;
    for (int64_t lane = 0; lane < WIDTH; ++lane) tokens[lane] = uint32_t(first + lane);
    Vector quantiles[TILE / WIDTH], largest = Vector() - INFINITE;
    for (int64_t k = 0; k < TILE / WIDTH; ++k) {
        quantiles[k] = by.gumbel.quantiles(tokens + uint32_t(k * WIDTH));
        largest = ranges[k].high > largest ? ranges[k].high : largest;
    }
    const float highest = largest_lane(largest) * by.factor;
    const float enough = Gumbel::quantile_of(best - highest - rounding_of_sum(best) - rounding_of_sum(highest));
    Integers found = {};
    for (const Vector& each : quantiles) found |= (Integers)(each < enough);
    if (best > -INFINITE && !any(found)) return false;
    for (int64_t k = 0; k < TILE / WIDTH; ++k) {
        const Vector noise = Gumbel::noise(quantiles[k]);
        const Vector low = ranges[k].low * by.factor, high = ranges[k].high * by.factor;
        ranges[k] = {low + noise - rounding_of_sum(low), high + noise + rounding_of_sum(high)};
    }
    return true;
}

// The bounds of a tile with outputs `y`, for tokens from `first` on. `y` and the exact outputs are both rounded to T, each with
// an error of half a unit in the last place. Outputs whose `errors` are NaN are ignored. `best`: a lower bound in the same row.
template <typename T>
static Limits limits_of(const T* y, const float* errors, const Measure& by, int64_t first, float best) {
    constexpr float ROUNDING = std::is_same_v<T, float> ? 0x1p-23f : 0x1p-7f;
    Range ranges[TILE / WIDTH];
    for (int64_t k = 0; k < TILE / WIDTH; ++k) {
        const Vector v = load(y + k * WIDTH), error = load(errors + k * WIDTH) * by.norm;
        const Vector most = (error + absolute(v) * ROUNDING) * SLACK;
        ranges[k] = {v - most, v + most};
    }
    if (by.factor > 0.0f && !add_noise(ranges, by, first, best)) return {};
    Vector low = Vector() - INFINITE, high = low;
    for (const Range& each : ranges) {
        low = each.low > low ? each.low : low;
        high = each.high > high ? each.high : high;
    }
    return {largest_lane(low), largest_lane(high)};
}

// Finds the tiles that may contain one of the `most` largest outputs of a row; false if screening fails or does not pay off.
template <typename T>
static bool find_tiles(const ScreenedLinear& s, int64_t most, Memory& memory) {
    const int64_t tiles = s.outputs / TILE;
    float* low = at_least(memory.low, s.rows * tiles);
    float* high = at_least(memory.high, s.rows * tiles);
    std::vector<Measure> measures;
    for (int64_t row = 0; row < s.rows; ++row) {
        const float norm = norm_of((const T*)s.x + row * s.inputs, s.inputs);
        if (!(norm >= LEAST && norm < INFINITE)) return false;
        measures.push_back({norm, s.factors[row], Gumbel(s.keys[row])});
    }
    team::for_each((tiles + CHUNK - 1) / CHUNK, s.rows * s.outputs >= PARALLEL_FROM, [&](int64_t chunk) {
        for (int64_t row = 0; row < s.rows; ++row) {
            float best = -INFINITE;
            for (int64_t tile = chunk * CHUNK; tile < std::min((chunk + 1) * CHUNK, tiles); ++tile) {
                const T* y = (const T*)s.y + row * s.outputs + tile * TILE;
                const Limits found = limits_of(y, s.errors + tile * TILE, measures[row], s.first + tile * TILE, best);
                low[row * tiles + tile] = found.low;
                high[row * tiles + tile] = found.high;
                best = std::max(best, found.low);
            }
        }
    });
    float least[MOST_ROWS];
    for (int64_t row = 0; row < s.rows; ++row) {
        float* ranked = at_least(memory.ranked, tiles);
        std::copy_n(low + row * tiles, tiles, ranked);
        const float distance = s.distances[row];
        float* last = ranked + std::min(measures[row].factor > 0.0f || distance > 0.0f ? 1 : most, tiles) - 1;
        std::nth_element(ranked, last, ranked + tiles, std::greater<float>());
        const float likeliest = *std::max_element(ranked, last + 1);
        if (!(std::fabs(*last) < INFINITE) || *last < -s.farthest || likeliest > s.farthest) return false;
        least[row] = distance > 0.0f ? *last - distance - (std::fabs(*last) + distance) * ROUNDED : *last;
    }
    memory.tiles.clear();
    for (int64_t tile = 0; tile < tiles; ++tile) {
        bool may = false;
        for (int64_t row = 0; row < s.rows; ++row) may |= high[row * tiles + tile] >= least[row];
        if (may) memory.tiles.push_back(tile);
    }
    return int64_t(memory.tiles.size()) * SHARE <= tiles;
}

// Replaces the outputs of these tiles, at most GATHERED, by the exact ones.
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

// Computes the largest outputs exactly, with screening; false if screening fails or does not pay off.
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

// `pause`: after screening failed, the number of calls that still skip it, and the length of the last pause.
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

// Quantises a tile's weights to INT8 codes (see expanded_formats.h) with `scales`. `errors`: bound of the difference between
// outputs of codes and of weights, divided by the norm of x.
template <class Number>
static void screen_tile(const uint32_t* weight, int64_t inputs, uint32_t* codes, float* scales, float* errors) {
    using Format = FromHalves<Number>;
    constexpr int64_t COUNT = TILE / LANES;
    Lanes largest[COUNT] = {}, squares[COUNT] = {}, lost[COUNT] = {}, factors[COUNT], steps[COUNT];
    const auto words_of = [&](int64_t input) { return weight + input / Format::INPUTS * Format::WORDS; };
    for (int64_t i = 0; i < inputs; i += Format::INPUTS)
        expand_inputs<Format>(words_of(i), [&](int64_t, int64_t o, Lanes v) __attribute__((always_inline)) {
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
            expand_inputs<Format>(words_of(i + half), [&](int64_t n, int64_t o, Lanes v) __attribute__((always_inline)) {
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

// Computes the codes, scales and errors of `ScreenedLinear` from weights (outputs, inputs), packed in `format`. `inputs` is a
// multiple of 4.
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
