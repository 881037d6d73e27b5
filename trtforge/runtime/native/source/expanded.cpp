// Linear layers with 16-, 8- or 4-bit weights on any processor. Weights are expanded (dequantised) in the cache, a few inputs
// of a tile at a time, and multiplied there. They are expanded to float32, or to bfloat16 or integers if the processor
// multiplies these faster and they represent weights and inputs exactly.

#include "amx_blocks.h"
#include "coded_rows.h"
#include "expanded_ways.h"
#include "linears.h"
#include "team.h"
#include "vectors.h"

#include <type_traits>

namespace expanded {

constexpr int64_t BLOCK = 192;  // rows in a block, for which weights are expanded once
constexpr int64_t AHEAD = 512;  // prefetch distance in words, for a single row

// Inputs of a row, rounded up to whole chunks.
template <class Way>
static inline int64_t padded(int64_t inputs) {
    return (inputs + Way::CHUNK - 1) / Way::CHUNK * Way::CHUNK;
}

// Rows of activations in chunks of inputs, (chunks, rows, CHUNK): the rows of a chunk are contiguous, so that they do not
// evict each other from the cache.
template <class Way>
struct Rows {
    const typename Way::Input* from;
    const float* factors;  // one per row, for its sums
    int64_t count;

    const typename Way::Input* at(int64_t input) const {
        return from + input / Way::CHUNK * count * Way::CHUNK + input % Way::CHUNK;
    }
};

// sums (rows, TILE) += rows times inputs [first, first + count) of a tile, which are in one chunk; = if `fresh`. `scales`: the
// tile's block scales if the weights are to be scaled, else null.
template <class Way, class Format>
static void multiply_part(const Rows<Way>& x, const uint32_t* tile, const float* scales, int64_t first,
                          int64_t count, bool fresh, float* sums) {
    const uint32_t* from = tile + first / Format::INPUTS * Format::WORDS;
    alignas(64) typename Way::Input weights[Way::CHUNK * TILE];
    Way::template expand<Format>(from, count, scales_from(scales, first), weights);
    const int64_t words = count / Format::INPUTS * Format::WORDS;
    for (int64_t row = 0, rows; row < x.count; row += rows) {  // each part also prefetches some of the next weights
        rows = float32::share(x.count - row, Way::ROWS);
        for (int64_t at = row * words / x.count; at < (row + rows) * words / x.count; at += 16)
            __builtin_prefetch(from + words + at, 0, 2);
        Way::multiply(x.at(first) + row * Way::CHUNK, rows, weights, count, fresh, sums + row * TILE);
    }
}

// Like `multiply_part`, over inputs [first, end).
template <class Way, class Format>
static void multiply_inputs(const Rows<Way>& x, const uint32_t* tile, const float* scales, int64_t first,
                            int64_t end, bool fresh, float* sums) {
    for (int64_t next; first < end; first = next, fresh = false) {
        next = std::min(first / Way::CHUNK * Way::CHUNK + Way::CHUNK, end);
        multiply_part<Way, Format>(x, tile, scales, first, next - first, fresh, sums);
    }
}

// Writes the outputs of the tile whose first output is `first` to y (rows, outputs). `factors`: one per row, or null.
template <typename T>
struct Output {
    const ExpandedLinear& l;
    const float* factors;
    T* y;
    int64_t first;

    void put(int64_t row, int64_t rows, const float* totals) const {
        for (int64_t m = 0; m < rows; ++m)
            for (int64_t i = 0; i < TILE; i += WIDTH) {
                Vector v = load(totals + m * TILE + i) * (factors ? l.factor * factors[row + m] : l.factor);
                if (l.bias) v += load(l.bias + first + i);
                ::put(y + (row + m) * l.outputs + first + i, v);
            }
    }
};

// Multiplies rows by the tile whose first output is `first`, and writes y (rows, outputs).
template <class Way, class Format, typename T>
static void multiply_tile(const ExpandedLinear& l, const Rows<Way>& x, int64_t first, T* y) {
    alignas(64) float sums[BLOCK * TILE], totals[BLOCK * TILE];
    const uint32_t* tile = (const uint32_t*)l.weight + first / TILE * (l.inputs / Format::INPUTS * Format::WORDS);
    const float* scales = l.scales ? l.scales + first * (l.inputs / l.group) : nullptr;
    if (scales && !Format::SCALED) {
        for (int64_t start = 0; start < l.inputs; start += l.group, scales += TILE) {
            multiply_inputs<Way, Format>(x, tile, nullptr, start, start + l.group, true, sums);
            float32::add_scaled(sums, scales, x.count, start == 0, totals);
        }
    } else {
        multiply_inputs<Way, Format>(x, tile, scales, 0, l.inputs, true, totals);
    }
    Output<T>{l, x.factors, y, first}.put(0, x.count, totals);
}

// Rounds to E4M3: four significant bits, ties to even, multiples of 2^-9 below 2^-6. Adding 1.5 x 2^20 times the number's
// power of two and subtracting it again leaves these bits.
static inline Vector rounded_to_e4m3(Vector exact) {
    const Vector inside = larger(-448.0f, smaller(448.0f, exact));
    const Vector magic = larger(0x1p-6f, (Vector)((Words)inside & 0x7f800000)) * 0x1.8p20f;
    return (inside + magic) - magic;
}

static inline Vector rounded_to_int8(Vector exact) {
    return (larger(-128.0f, smaller(127.0f, exact)) + 0x1.8p23f) - 0x1.8p23f;
}

// Rounds to E2M1 times the block's `scale`: two significant bits, multiples of 0.5 below 2, ties to even.
static inline Vector rounded_to_e2m1(Vector exact, float scale) {
    const Vector inside = larger(-6.0f, smaller(6.0f, exact / (scale > 0.0f ? scale : 1.0f)));
    const Vector magic = larger(1.0f, (Vector)((Words)inside & 0x7f800000)) * 0x1.8p22f;
    return ((inside + magic) - magic) * scale;
}

// The E4M3 scale of the block of 16 inputs that contains input i, after inputs are divided by `scale`.
template <typename T>
static inline float scale_of_block(const T* x, int64_t i, float scale) {
    Vector most = {};
    for (int64_t at = i / BLOCK_OF_NVFP4 * BLOCK_OF_NVFP4, end = at + BLOCK_OF_NVFP4; at < end; at += WIDTH) {
        const Vector v = absolute(load(x + at) / scale);
        most = most > v ? most : v;
    }
    float largest = 0.0f;
    for (int64_t lane = 0; lane < WIDTH; ++lane) largest = std::max(largest, float(most[lane]));
    return rounded_to_e4m3(Vector() + largest / 6.0f)[0];
}

// WIDTH inputs from i on, rounded to the codes of their group and dequantised, for processors without fast byte products.
template <typename T>
static inline Vector rounded_by_group(const ExpandedLinear& l, const T* x, int64_t i) {
    alignas(64) int8_t codes[MOST_IN_GROUP];
    const int64_t first = i / l.group * l.group;
    const float scale = code_group(l, x, first, codes).scale;
    Vector found;
    for (int64_t lane = 0; lane < WIDTH; ++lane) found[lane] = codes[i - first + lane / 4 * 4 + CODE_ORDER[lane % 4]];
    return found * scale;
}

// WIDTH inputs from i on, times their pre-quantisation scales, and rounded as the layer requires.
template <Inputs KIND, typename T>
static inline Vector prepared(const ExpandedLinear& l, const T* x, int64_t i, float scale) {
    Vector v = load(x + i);
    if (l.prequant) v *= load(l.prequant + i);
    if (KIND == E4M3 || KIND == E4M3_BY_ROW) return rounded_to_e4m3(v / scale);
    if (KIND == NVFP4) return rounded_to_e2m1(v / scale, scale_of_block(x, i, scale));  // NVFP4 has no prequant
    if (KIND == INT8_BY_GROUP) return rounded_by_group(l, x, i);
    return KIND == INT8 ? rounded_to_int8(v / scale) : v;
}

// The scale that maps a row's amax to the largest E4M3 value, but at least `activation_scale`.
template <typename T>
static float scale_of_row(const ExpandedLinear& l, const T* x) {
    Vector most = {};
    for (int64_t i = 0; i < l.inputs; i += WIDTH) {
        const Vector v = absolute(load(x + i));
        most = most > v ? most : v;
    }
    float largest = 0.0f;
    for (int64_t i = 0; i < WIDTH; ++i) largest = std::max(largest, float(most[i]));
    return std::max(largest / 448.0f, l.activation_scale);
}

// Prepares one of `rows` rows in the layout of `Rows`. Returns the row's own scale that it was divided by, 1 if it has none.
template <class Way, Inputs KIND, typename T>
static float prepare_row(const ExpandedLinear& l, const T* x, int64_t rows, typename Way::Input* into) {
    constexpr int64_t CHUNK = Way::CHUNK;
    const float scale = KIND == E4M3_BY_ROW ? scale_of_row(l, x) : l.activation_scale;
    for (int64_t first = 0; first < l.inputs; first += CHUNK, into += rows * CHUNK)
        for (int64_t i = 0; i < std::min(CHUNK, l.inputs - first); i += WIDTH)
            put(into + i, prepared<KIND>(l, x, first + i, scale));
    return KIND == E4M3_BY_ROW ? scale : 1.0f;
}

// Calls f(kind) with the kind of rounding as a compile-time constant.
template <class F>
static inline auto by_kind(int64_t kind, F f) {
    switch (kind) {
        case E4M3: return f(std::integral_constant<Inputs, E4M3>());
        case E4M3_BY_ROW: return f(std::integral_constant<Inputs, E4M3_BY_ROW>());
        case INT8: return f(std::integral_constant<Inputs, INT8>());
        case NVFP4: return f(std::integral_constant<Inputs, NVFP4>());
        case INT8_BY_GROUP: return f(std::integral_constant<Inputs, INT8_BY_GROUP>());
        default: return f(std::integral_constant<Inputs, AS_THEY_ARE>());
    }
}

template <class Way, typename T>
static float prepare(const ExpandedLinear& l, const T* x, int64_t rows, typename Way::Input* into) {
    return by_kind(l.kind, [&](auto kind) { return prepare_row<Way, kind()>(l, x, rows, into); });
}

// A single row, prepared by `prepare_offsets`.
struct Row {
    const float* x;
    const float* offsets;  // one per group, for its sums
    int64_t inputs, group;
};

// Computes the offsets of a single row's groups, and divides its inputs by the powers that multiply their weights.
template <class Single>
static void prepare_offsets(float* x, int64_t inputs, int64_t group, float* offsets) {
    Vector powers;
    for (int64_t i = 0; i < WIDTH; ++i) powers[i] = 1.0f / Single::POWERS[i % Single::INPUTS];
    for (int64_t first = 0; first < inputs; first += group) {
        Vector sums = {};
        for (int64_t i = first; i < first + group; i += WIDTH) {
            const Vector v = load(x + i);
            sums += v;
            put(x + i, v * powers);
        }
        *offsets++ = -Single::OFFSET * sum(sums);
    }
}

// totals (TILE) = a single row times the tile at `from`, whose weights are expanded in registers. `scales`: (groups, TILE), or
// null. Weights of 4 bits are multiplied one vector of words after another, so that the accumulators fit in registers.
template <class Single>
static void multiply_row(const Row& row, const uint32_t* from, const float* scales, float* totals) {
    constexpr int64_t INPUTS = Single::INPUTS, WORDS = Single::WORDS, HALVES = TILE / WORDS, LINE = 16;
    constexpr int64_t COLUMNS = HALVES > 1 ? 1 : WORDS / LANES;
    constexpr int64_t CHAINS = HALVES > 1 ? INPUTS : 2;  // accumulators per output, to hide the latency of additions
    for (int64_t start = 0, count; start < row.inputs; start += count, from += count / INPUTS * WORDS) {
        const int64_t group = start / row.group, inside = start % row.group;
        count = std::min(Floats::CHUNK, row.group - inside);  // sums of few inputs, which are added, are more exact
        const float* x = row.x + start;
        const auto add_outputs = [&](int64_t left) __attribute__((always_inline)) {
            Lanes made[COLUMNS][CHAINS][HALVES] = {};
            const uint32_t* at = from + left;
            for (int64_t first = 0; first < count; first += INPUTS, at += WORDS) {
#pragma GCC unroll 8
                for (int64_t column = 0; column < COLUMNS; ++column) {
                    const int64_t o = column * LANES;
                    if ((left + o) % LINE == 0) __builtin_prefetch(at + AHEAD + o);
                    Single::expand(words(at + o), [&](int64_t i, int64_t half, Lanes v) __attribute__((always_inline)) {
                        made[column][i % CHAINS][half] += v * x[first + i];
                    });
                }
            }
#pragma GCC unroll 8
            for (int64_t column = 0; column < COLUMNS; ++column)
#pragma GCC unroll 2
                for (int64_t half = 0; half < HALVES; ++half) {
                    Lanes sum = made[column][0][half];
#pragma GCC unroll 4
                    for (int64_t chain = 1; chain < CHAINS; ++chain) sum += made[column][chain][half];
                    if (Single::OFFSET != 0.0f && inside == 0) sum += row.offsets[group];
                    const int64_t o = half * WORDS + left + column * LANES;
                    if (scales) sum *= *(const Lanes*)(scales + group * TILE + o);
                    put_lanes(totals + o, start == 0 ? sum : *(const Lanes*)(totals + o) + sum);
                }
        };
#pragma GCC unroll 4
        for (int64_t left = 0; left < WORDS; left += COLUMNS * LANES) add_outputs(left);
    }
}

// y for a single row. Every thread prepares the row, which is faster than waiting for one thread to do it.
template <class Format, typename T>
static void multiply_single(const ExpandedLinear& l) {
    using Single = typename Format::Single;
    const int64_t group = l.scales ? l.group : l.inputs, groups = l.inputs / group;
    const int64_t offsets = padded<Floats>(l.inputs);  // where these begin, after the inputs
    team::run(l.inputs * l.outputs >= 1 << 17, [&](team::Member& member) {
        float* memory = memory_for<float>(offsets + groups);
        const float factor = prepare<Floats>(l, (const T*)l.x, 1, memory) / Single::FACTOR;
        if constexpr (Single::OFFSET != 0.0f) prepare_offsets<Single>(memory, l.inputs, group, memory + offsets);
        const Row row{memory, memory + offsets, l.inputs, group};
        member.each(l.outputs / TILE, [&](int64_t tile) {
            alignas(64) float totals[TILE];
            const uint32_t* from = (const uint32_t*)l.weight + tile * (l.inputs / Single::INPUTS * Single::WORDS);
            multiply_row<Single>(row, from, l.scales ? l.scales + tile * TILE * groups : nullptr, totals);
            Output<T>{l, &factor, (T*)l.y, tile * TILE}.put(0, 1, totals);
        });
    });
}

template <class Way, class Format, typename T>
static void multiply_rows(const ExpandedLinear& l) {
    using Input = typename Way::Input;
    const int64_t height = float32::share(l.rows, BLOCK);
    float* factors = memory_for<float>(BLOCK + height * padded<Way>(l.inputs));
    Input* memory = (Input*)(factors + BLOCK);
    for (int64_t top = 0; top < l.rows; top += height) {
        const int64_t rows = std::min(height, l.rows - top);
        const T* from = (const T*)l.x + top * l.inputs;
        T* y = (T*)l.y + top * l.outputs;
        team::run(rows * l.inputs * l.outputs >= 1 << 17, [&](team::Member& member) {
            member.each(rows, [&](int64_t row) {
                const float scale = prepare<Way>(l, from + row * l.inputs, rows, memory + row * Way::CHUNK);
                factors[row] = scale / Way::template FACTOR<Format>;
            });
            if (member.size > 1) member.barrier();
            const Rows<Way> x{memory, factors, rows};
            member.each(l.outputs / TILE, [&](int64_t tile) { multiply_tile<Way, Format>(l, x, tile * TILE, y); });
        });
    }
}

#if defined(HAS_AMX)

// Prepares and packs a row. Returns the row's own scale that it was divided by, 1 if it has none.
template <Inputs KIND, typename T>
static float pack_row(const ExpandedLinear& l, const T* x, const amx::Row<bfloat16>& into) {
    const float scale = KIND == E4M3_BY_ROW ? scale_of_row(l, x) : l.activation_scale;
    for (int64_t i = 0; i < l.inputs; i += amx::DEPTH<bfloat16>)
        for (int64_t half = 0; half < amx::DEPTH<bfloat16>; half += WIDTH)
            put(into.at(i) + half, prepared<KIND>(l, x, i + half, scale));
    return KIND == E4M3_BY_ROW ? scale : 1.0f;
}

// Multiplies with AMX.
template <class Format, typename T>
static void multiply_blocks(const ExpandedLinear& l) {
    constexpr int64_t WORDS = amx::DEPTH<bfloat16> / Format::INPUTS * Format::WORDS, AHEAD = 8;  // steps to prefetch ahead
    const int64_t words_of_tile = l.inputs / Format::INPUTS * Format::WORDS;
    float* factors = memory_for<float>(l.rows);
    const auto pack = [&](int64_t row, const amx::Row<bfloat16>& into, int64_t, int64_t) {
        const T* x = (const T*)l.x + row * l.inputs;
        factors[row] = by_kind(l.kind, [&](auto kind) { return pack_row<kind()>(l, x, into); }) / Pairs::FACTOR<Format>;
    };
    amx::for_each_tile<bfloat16>(l.rows, l.inputs, l.outputs, l.inputs, pack, [&](const auto& x, int64_t tile) {
        const int64_t first = tile * TILE;
        const uint32_t* w = (const uint32_t*)l.weight + tile * words_of_tile;
        const float* scales = l.scales ? l.scales + first * (l.inputs / l.group) : nullptr;
        const auto expand = [&](int64_t input, bfloat16* into) {
            const uint32_t* from = w + input / Format::INPUTS * Format::WORDS;
            prefetch(from + WORDS * AHEAD, WORDS);
            Pairs::expand<Format>(from, amx::DEPTH<bfloat16>, scales_from(scales, input), into);
        };
        const Output<T> output{l, factors, (T*)l.y, first};
        Format::SCALED ? amx::multiply_expanded(x, l.inputs, nullptr, expand, output)
                       : amx::multiply_expanded(x, l.group, scales, expand, output);
    });
}

#endif

#if defined(HAS_AMX)

// Multiplies inputs rounded to 8 bits with AMX.
template <typename T>
static void multiply_coded_blocks(const ExpandedLinear& l) {
    const int64_t count = l.inputs / l.group;
    CodedGroup* groups = memory_for<CodedGroup>(l.rows * count);
    const auto pack = [&](int64_t row, const amx::Row<int8_t>& into, int64_t first, int64_t inputs) {
        alignas(64) int8_t codes[MOST_IN_GROUP];
        for (int64_t at = first; at < first + inputs; at += l.group) {
            groups[row * count + at / l.group] = code_group(l, (const T*)l.x + row * l.inputs, at, codes);
            for (int64_t i = 0; i < l.group; i += amx::DEPTH<int8_t>)
                std::memcpy(into.at(at + i), codes + i, size_t(amx::DEPTH<int8_t>));
        }
    };
    amx::for_each_tile<int8_t>(l.rows, l.inputs, l.outputs, l.group, pack, [&](const auto& x, int64_t tile) {
        const uint32_t* w = (const uint32_t*)l.weight + tile * (l.inputs / 4 * QUAD);
        multiply_codes(x, groups, w, l.scales + tile * TILE * count, l.group, Output<T>{l, nullptr, (T*)l.y, tile * TILE});
    });
}

#endif

#if defined(HAS_CODES)

// Multiplies inputs rounded to 8 bits with vector instructions. Panels of rows are multiplied one after another by a tile,
// which stays in a cache.
template <typename T>
static void multiply_coded(const ExpandedLinear& l) {
    constexpr int64_t MOST = 256;  // rows whose codes stay in a cache
    const int64_t height = float32::share(l.rows, MOST), count = l.inputs / l.group;
    CodedGroup* groups = memory_for<CodedGroup>(height * count);
    int8_t* codes = memory_for<int8_t>(height * l.inputs);
    for (int64_t top = 0; top < l.rows; top += height) {
        const int64_t rows = std::min(height, l.rows - top), panel = float32::share(rows, CODED_PANEL);
        const T* from = (const T*)l.x + top * l.inputs;
        const auto panel_of = [&](int64_t row) {
            const int64_t first = row / panel * panel;
            return CodedPanel{codes + first * l.inputs, groups + first * count, first, std::min(panel, rows - first)};
        };
        team::run(rows * l.inputs * l.outputs >= 1 << 17, [&](team::Member& member) {
            member.each(rows, [&](int64_t row) {
                const CodedPanel x = panel_of(row);
                for (int64_t index = 0; index < count; ++index) {
                    const int64_t at = index * x.rows + row - x.first;
                    x.groups[at] = code_group(l, from + row * l.inputs, index * l.group, x.codes + at * l.group);
                }
            });
            if (member.size > 1) member.barrier();
            member.each(l.outputs / TILE, [&](int64_t tile) {
                alignas(64) float totals[CODED_PANEL * TILE];
                const uint32_t* w = (const uint32_t*)l.weight + tile * (l.inputs / 4 * QUAD);
                const Output<T> y{l, nullptr, (T*)l.y + top * l.outputs, tile * TILE};
                for (int64_t row = 0; row < rows; row += panel) {
                    const CodedPanel x = panel_of(row);
                    multiply_codes(x, w, l.scales + tile * TILE * count, l.group, count, totals);
                    y.put(row, x.rows, totals);
                }
            });
        });
    }
}

#endif

// Whether every prepared input of the layer is exact in bfloat16.
template <typename T>
static bool inputs_are_bfloat16(const ExpandedLinear& l) {
    if (l.kind == AS_THEY_ARE) return std::is_same_v<T, bfloat16> && !l.prequant;
    return l.kind != INT8_BY_GROUP;
}

template <class Format, typename T>
static void multiply(const ExpandedLinear& l) {
    if constexpr (std::is_same_v<Format, FromInt4>)
        if (l.kind == INT8_BY_GROUP) {
#if defined(HAS_AMX)
            if (amx::suits<int8_t>(l.group)) return multiply_coded_blocks<T>(l);
#endif
#if defined(HAS_CODES)
            return multiply_coded<T>(l);
#endif
        }
#if defined(HAS_AMX)
    if constexpr (Format::IN_BFLOAT16)
        if (inputs_are_bfloat16<T>(l) && amx::suits(l.scales && !Format::SCALED ? l.group : l.inputs))
            return multiply_blocks<Format, T>(l);
#endif
    if (l.rows == 1) return multiply_single<Format, T>(l);
#if defined(HAS_SHORTS)
    if constexpr (std::is_same_v<Format, FromBytes<Int8>>)
        if (l.kind == INT8) return multiply_rows<Shorts, Format, T>(l);
#endif
#if defined(__AVX512BF16__)
    if constexpr (Format::IN_BFLOAT16)
        if (inputs_are_bfloat16<T>(l) && !multiply_adds_are_faster())
            return l.rows <= ROWS ? multiply_rows<Pairs, Format, T>(l) : multiply_rows<LongPairs, Format, T>(l);
#endif
    multiply_rows<Floats, Format, T>(l);
}

template <class Format>
static void with_type(int64_t type, const ExpandedLinear& l) {
    type == FLOAT32 ? multiply<Format, float>(l) : multiply<Format, bfloat16>(l);
}

EXPORT void linear_expanded(int64_t type, const ExpandedLinear* l) {
    if (l->rows == 0) return;
    switch (l->format) {
        case OF_BFLOAT16: return with_type<FromHalves<Bfloat16>>(type, *l);
        case OF_FLOAT16: return with_type<FromHalves<Float16>>(type, *l);
        case OF_INT8: return with_type<FromBytes<Int8>>(type, *l);
        case OF_E4M3: return with_type<FromBytes<E4m3>>(type, *l);
        case OF_INT4: return with_type<FromInt4>(type, *l);
        case OF_E2M1: return with_type<FromE2m1>(type, *l);
    }
}

}  // namespace expanded
