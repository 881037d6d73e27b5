// INT4 weights times inputs that are rounded to 8 bits, for expanded.cpp: processors multiply bytes several times as fast as
// the types that represent inputs exactly.
//
// Each group of a row's inputs has its own scale, its amax / 127, like llama.cpp's Q8 blocks. With input codes c and nibbles n,
// which are weights plus 8, a group adds (sum of n c - 8 sum of c) times both scales to the result; the sums are exact in 32
// bits.

#pragma once

#include "amx_blocks.h"
#include "expanded_formats.h"
#include "linears.h"
#include "vectors.h"

#include <cfloat>
#include <limits>

namespace expanded {

constexpr uint32_t LOW_NIBBLES = 0x0f0f0f0fu;
constexpr float LARGEST_INPUT_CODE = 127.0f;
constexpr float LEAST_INPUT = 0x1p-100f;  // groups of smaller inputs become zeros: the quotient might not be finite

// Four inputs are stored in the order first, third, second, fourth, like the nibbles of their weights in a word.
constexpr int64_t CODE_ORDER[4] = {0, 2, 1, 3};

static inline void put_codes(int8_t* into, Integers codes) {
#if defined(__AVX512F__)
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    _mm_storeu_si128((__m128i*)into, _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)codes), order));
#elif defined(__AVX2__)
    const __m256i lowest = _mm256_set1_epi32(0x0c04'0800), found = _mm256_shuffle_epi8((__m256i)codes, lowest);
    const int32_t first = _mm256_cvtsi256_si32(found), second = _mm256_extract_epi32(found, 4);
    std::memcpy(into, &first, sizeof first);
    std::memcpy(into + 4, &second, sizeof second);
#else
    for (int64_t i = 0; i < WIDTH; ++i) into[i] = int8_t(codes[i / 4 * 4 + CODE_ORDER[i % 4]]);
#endif
}

// The nearest integers, ties to even. There is no addition here, which the compiler could fuse with the caller's product: a
// fused multiply-add rounds differently.
static inline Integers nearest(Vector v) {
#if defined(__AVX512F__)
    return (Integers)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX__)
    return (Integers)_mm256_cvtps_epi32((__m256)v);
#else
    Integers found;
    for (int64_t lane = 0; lane < WIDTH; ++lane) found[lane] = int32_t(std::nearbyintf(v[lane]));
    return found;
#endif
}

static inline int32_t sum_of(Integers v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int64_t lane = 0; lane < WIDTH; ++lane) total += v[lane];
    return total;
#endif
}

// The bits of the largest of nonnegative numbers; NaN counts as larger than infinity.
static inline uint32_t largest_bits(Integers v) {
#if defined(__AVX512F__)
    return uint32_t(_mm512_reduce_max_epi32((__m512i)v));
#else
    int32_t largest = 0;
    for (int64_t lane = 0; lane < WIDTH; ++lane) largest = std::max(largest, int32_t(v[lane]));
    return uint32_t(largest);
#endif
}

// A group's scale, and -8 times the sum of its codes.
struct CodedGroup {
    float scale;
    int32_t offset;
};

// Writes the codes of a group's inputs from `first` on. If an input is not finite, the scale and so all products are NaN.
template <typename T>
static inline CodedGroup code_group(const ExpandedLinear& l, const T* x, int64_t first, int8_t* into) {
    const auto at = [&](int64_t i) {
        const Vector v = load(x + first + i);
        return l.prequant ? v * load(l.prequant + first + i) : v;
    };
    Integers most = {}, sums = {};
    for (int64_t i = 0; i < l.group; i += WIDTH) {
        const Integers size = (Integers)absolute(at(i));
        most = most > size ? most : size;
    }
    const float largest = from_bits(largest_bits(most));
    if (!(largest <= FLT_MAX)) {
        std::fill_n(into, l.group, int8_t(0));
        return {std::numeric_limits<float>::quiet_NaN(), 0};
    }
    const float inverse = largest < LEAST_INPUT ? 0.0f : LARGEST_INPUT_CODE / largest;
    for (int64_t i = 0; i < l.group; i += WIDTH) {
        const Integers codes = nearest(at(i) * inverse);
        sums += codes;
        put_codes(into + i, codes);
    }
    return {largest / LARGEST_INPUT_CODE, -8 * sum_of(sums)};
}

constexpr int64_t QUAD = 16;  // words of a tile that hold four inputs
constexpr int64_t MOST_IN_GROUP = 256;

// Unpacks the nibbles of a group to bytes: words of four inputs (inputs / 4, TILE).
static inline void nibbles_of(const uint32_t* from, int64_t inputs, uint32_t* into) {
    for (int64_t quad = 0; quad < inputs / 4; ++quad, from += QUAD, into += TILE)
        for (int64_t o = 0; o < QUAD; o += LANES) {
            const LaneWords both = words(from + o);
            *(LaneWords*)(into + o) = both & LOW_NIBBLES;
            *(LaneWords*)(into + QUAD + o) = (both >> 4) & LOW_NIBBLES;
        }
}

#if defined(HAS_AMX)

// totals (rows, TILE) += a group's sums (rows, TILE), with offsets and scales. `groups`: one per row, with stride `count`.
static inline void add_group(const int32_t* sums, const CodedGroup* groups, int64_t count, const float* scales, int64_t rows,
                             float* totals) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t o = 0; o < TILE; o += WIDTH) {
            const Integers exact = *(const Integers*)(sums + row * TILE + o) + groups[row * count].offset;
            const Vector factors = load(scales + o) * groups[row * count].scale;
            float* total = totals + row * TILE + o;
            put(total, load(total) + __builtin_convertvector(exact, Vector) * factors);
        }
}

// Multiplies the rows of a block by a weight tile with AMX. `groups`: (all rows, count); `scales`: (count, TILE).
template <class Output>
static void multiply_codes(const amx::Block<int8_t>& x, const CodedGroup* groups, const uint32_t* tile, const float* scales,
                           int64_t group, const Output& y) {
    constexpr int64_t PAIR = 2 * amx::HEIGHT;
    alignas(64) uint32_t weights[MOST_IN_GROUP / 4 * TILE];
    alignas(64) int32_t sums[PAIR * TILE];
    alignas(64) float totals[amx::MOST_ROWS * TILE];
    std::fill_n(totals, x.rows * TILE, 0.0f);
    const int64_t count = x.inputs / group;
    for (int64_t index = 0; index < count; ++index, tile += group / 4 * QUAD, scales += TILE) {
        nibbles_of(tile, group, weights);
        prefetch(tile + group / 4 * QUAD, group / 4 * QUAD);
        amx::each_pair(x, [&](int64_t pair, int64_t row, int64_t rows) {
            amx::multiply(x, pair, index * group, (const uint8_t*)weights, group, true, sums, amx::Nothing());
            add_group(sums, groups + (x.first + row) * count + index, count, scales, rows, totals + row * TILE);
        });
    }
    y.put(x.first, x.rows, totals);
}

#endif

#if (defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))) && !defined(TRTFORGE_NARROW_VECTORS)
#define HAS_CODES 1

// sums + dot products of four unsigned and four signed bytes in each word. The sum of two products of a nibble and a code
// fits in 16 bits. Inline assembly, because GCC 12 moves the intrinsic's accumulators between registers and to memory.
static inline LaneIntegers add_bytes(LaneIntegers sums, LaneWords nibbles, LaneIntegers codes) {
#if defined(__AVX512VNNI__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(nibbles), "v"(codes));
    return sums;
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)nibbles, (__m512i)codes);
    return sums + (LaneIntegers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__)
    return (LaneIntegers)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)nibbles, (__m256i)codes);
#else
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)nibbles, (__m256i)codes);
    return sums + (LaneIntegers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

constexpr int64_t CODED_ROWS = LANES == 16 ? 8 : 4;  // rows whose accumulators fit in registers

constexpr int64_t CODED_PANEL = 32;  // rows whose totals stay in the L1 cache with their codes of a group

// Codes of rows from `first` on, (groups, rows, inputs of a group): in this order, rows do not evict each other from the
// cache. `groups`: (groups, rows).
struct CodedPanel {
    int8_t* codes;
    CodedGroup* groups;
    int64_t first, rows;
};

// Prefetches the words of a later group. Rows are multiplied in `parts` parts, one after another; each step, which multiplies
// QUAD words, prefetches QUAD / parts words.
struct GroupsAhead {
    static constexpr int64_t GROUPS = 2;
    const uint32_t* from;
    int64_t pitch;

    GroupsAhead(const uint32_t* tile, int64_t group, int64_t part, int64_t parts) : pitch((QUAD + parts - 1) / parts) {
        from = tile + group / 4 * (GROUPS * QUAD + part * pitch);
    }
    void step(int64_t quad) const { __builtin_prefetch(from + quad * pitch); }
};

// totals (M, TILE) += the products of M rows with a group, whose words are at `tile`; = if `fresh`. `codes`, `groups`: of the
// rows. `scales`: (TILE,).
template <int M>
static void add_group(const int8_t* codes, const CodedGroup* groups, const uint32_t* tile, const GroupsAhead& ahead,
                      int64_t group, const float* scales, bool fresh, float* totals) {
    for (int64_t o = 0; o < QUAD; o += LANES) {
        LaneIntegers sums[M][2];
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = LaneIntegers() + groups[m].offset;
        for (int64_t quad = 0; quad < group / 4; ++quad) {
            if (o == 0) ahead.step(quad);
            const LaneWords both = words(tile + quad * QUAD + o);
            const LaneWords low = both & LOW_NIBBLES, high = (both >> 4) & LOW_NIBBLES;
#pragma GCC unroll 12
            for (int m = 0; m < M; ++m) {
                int32_t four;
                std::memcpy(&four, codes + m * group + 4 * quad, sizeof four);
                const LaneIntegers inputs = LaneIntegers() + four;
                sums[m][0] = add_bytes(sums[m][0], low, inputs);
                sums[m][1] = add_bytes(sums[m][1], high, inputs);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
            for (int64_t half = 0; half < 2; ++half) {
                const int64_t first = half * QUAD + o;
                Lanes* total = (Lanes*)(totals + m * TILE + first);
                const Lanes factors = *(const Lanes*)(scales + first) * groups[m].scale;
                const Lanes sum = __builtin_convertvector(sums[m][half], Lanes) * factors;
                *total = fresh ? sum : *total + sum;
            }
    }
}

// totals (rows, TILE) = the rows of a panel times a tile of `count` groups. `scales`: (count, TILE).
static void multiply_codes(const CodedPanel& x, const uint32_t* tile, const float* scales, int64_t group, int64_t count,
                           float* totals) {
    const int64_t parts = ::parts(x.rows, CODED_ROWS);
    for (int64_t index = 0; index < count; ++index, tile += group / 4 * QUAD, scales += TILE)
        for (int64_t row = 0, part = 0, rows; row < x.rows; row += rows, ++part) {
            rows = float32::share(x.rows - row, CODED_ROWS);
            const int64_t at = index * x.rows + row;
            const GroupsAhead ahead(tile, group, part, parts);
            const int8_t* codes = x.codes + at * group;
            with_constant<CODED_ROWS>(rows, [&](auto m) {
                add_group<m()>(codes, x.groups + at, tile, ahead, group, scales, index == 0, totals + row * TILE);
            });
        }
}

#endif

}  // namespace expanded
