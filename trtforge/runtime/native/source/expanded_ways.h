// Ways to multiply rows by weights that are expanded in the cache, for expanded.cpp.

#pragma once

#include "expanded_formats.h"
#include "float32.h"
#include "products.h"
#include "vectors.h"

#include <type_traits>

namespace expanded {

constexpr int64_t BLOCK_OF_NVFP4 = 16;

static inline void put_lanes(float* into, Lanes value) { *(Lanes*)into = value; }

// Weights of input `first` and outputs from `o` on; in a SCALED format multiplied by the scale of their block. scales: (blocks,
// TILE), from the block of input 0 on.
template <class Format>
static inline __attribute__((always_inline)) Lanes scaled(Lanes weights, const float* scales, int64_t first, int64_t o) {
    if constexpr (Format::SCALED) return weights * *(const Lanes*)(scales + first / BLOCK_OF_NVFP4 * TILE + o);
    return weights;
}

// Block scales (blocks, TILE) from the block of `input` on; null if there are none.
static inline const float* scales_from(const float* scales, int64_t input) {
    return scales ? scales + input / BLOCK_OF_NVFP4 * TILE : nullptr;
}

// Members of a way to multiply:
// - Input: the type of inputs and expanded weights; FACTOR: the factor of expanded weights.
// - expand: expands the words of `count` inputs of a tile, at most CHUNK, which fit in the L1 cache with a few rows.
// - multiply: sums (rows, TILE) += up to ROWS rows of x, with row stride CHUNK, times expanded weights; = if `fresh`.

struct Floats {
    using Input = float;
    static constexpr int64_t CHUNK = 128;
    template <class Format>
    static constexpr float FACTOR = Format::FACTOR;
    static constexpr int64_t ROWS = float32::ROWS;

    // To (count, TILE).
    template <class Format>
    static void expand(const uint32_t* from, int64_t count, const float* scales, float* into) {
        for (int64_t first = 0; first < count; first += Format::INPUTS, from += Format::WORDS) {
            expand_inputs<Format>(from, [&](int64_t i, int64_t o, Lanes v) {
                put_lanes(into + (first + i) * TILE + o, scaled<Format>(v, scales, first, o));
            });
        }
    }

    static void multiply(const float* x, int64_t rows, const float* tile, int64_t count, bool fresh, float* sums) {
        float32::multiply_tile(x, CHUNK, rows, tile, count, fresh, sums);
    }
};

#if defined(HAS_PRODUCTS)

#if defined(__AVX512VBMI__)

// The bfloat16 bits of a nonnegative E4M3 number, and of an integer from 0 to 128.
constexpr int of_e4m3(int number) {
    int exponent = number >> 3, mantissa = number & 7;
    if (exponent == 0 && mantissa > 0) {  // normalise a subnormal number
        for (exponent = 1; mantissa < 8; --exponent) mantissa *= 2;
        mantissa -= 8;
    }
    return number == 0 ? 0 : (exponent + 120) << 7 | mantissa << 4;
}

constexpr int of_integer(int number) {
    if (number == 0) return 0;
    int exponent = 7;
    for (; number < 128; --exponent) number *= 2;
    return (exponent + 127) << 7 | (number - 128);
}

// Lookup tables of both bytes of the bfloat16 of(i), for i from 0 to 127.
struct Table {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    constexpr explicit Table(int (*of)(int)) {
        for (int i = 0; i < 128; ++i) {
            low[i] = uint8_t(of(i) & 0xff);
            high[i] = uint8_t(of(i) >> 8);
        }
    }
};

// Converts bytes with a table: `index` gives the table indices of a vector of bytes, and `high` completes the high bytes that
// were looked up, with the sign.
struct E4m3Table {
    static constexpr Table TABLE{of_e4m3};
    static __m512i index(__m512i bytes) { return bytes; }
    static __m512i high(__m512i bytes, __m512i found) {
        return _mm512_or_si512(found, _mm512_and_si512(bytes, _mm512_set1_epi8(-128)));
    }
};

struct Int8Table {
    static constexpr Table TABLE{of_integer};
    static __m512i index(__m512i bytes) { return _mm512_abs_epi8(bytes); }
    static __m512i high(__m512i bytes, __m512i found) {
        const __m512i lowest = _mm512_set1_epi8(-128);  // its index selects the entry of 0
        const __mmask64 is_lowest = _mm512_cmpeq_epi8_mask(bytes, lowest);
        return _mm512_or_si512(_mm512_mask_mov_epi8(found, is_lowest, _mm512_set1_epi8(of_integer(128) >> 8)),
                               _mm512_and_si512(bytes, lowest));
    }
};

#endif

template <int64_t INPUTS>
struct PairsOf {
    using Input = bfloat16;
    static constexpr int64_t CHUNK = INPUTS;
#if defined(__AVX512VBMI__)
    template <class Format>
    static constexpr float FACTOR = std::is_same_v<Format, FromBytes<Int8>> ? 1.0f : Format::FACTOR;
#else
    template <class Format>
    static constexpr float FACTOR = Format::FACTOR;
#endif
    static constexpr int64_t ROWS = ::ROWS;

    // To (count / 2, TILE, 2), see products.h.
    template <class Format>
    static void expand(const uint32_t* from, int64_t count, const float* scales, bfloat16* into) {
#if defined(__AVX512VBMI__)
        if constexpr (std::is_same_v<Format, FromBytes<E4m3>>) return look_up<E4m3Table>(from, count, into);
        if constexpr (std::is_same_v<Format, FromBytes<Int8>>) return look_up<Int8Table>(from, count, into);
#endif
        for (int64_t first = 0; first < count; first += Format::INPUTS, from += Format::WORDS) {
            Lanes even[TILE / LANES];
            expand_inputs<Format>(from, [&](int64_t i, int64_t o, Lanes weights) __attribute__((always_inline)) {
                const Lanes v = scaled<Format>(weights, scales, first, o);
                if (i % 2 == 0) {
                    even[o / LANES] = v;
                } else {
                    const LaneWords pair = ((LaneWords)even[o / LANES] >> 16) | ((LaneWords)v & 0xffff0000u);
                    *(LaneWords*)(into + (first + i - 1) * TILE + 2 * o) = pair;
                }
            });
        }
    }

#if defined(__AVX512VBMI__)
    template <class Numbers>
    static void look_up(const uint32_t* from, int64_t count, bfloat16* into) {
        constexpr const Table& table = Numbers::TABLE;
        const __m512i lows[2] = {_mm512_load_si512(table.low), _mm512_load_si512(table.low + 64)};
        const __m512i highs[2] = {_mm512_load_si512(table.high), _mm512_load_si512(table.high + 64)};
        // For four outputs with four inputs each: the first two inputs of every output, then the other two.
        const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
        for (int64_t first = 0; first < count; first += 4)
            for (int64_t half = 0; half < 2; ++half, from += 16) {
                const __m512i bytes = _mm512_shuffle_epi8(_mm512_loadu_si512(from), order), index = Numbers::index(bytes);
                const __m512i low = _mm512_permutex2var_epi8(lows[0], index, lows[1]);
                const __m512i high = Numbers::high(bytes, _mm512_permutex2var_epi8(highs[0], index, highs[1]));
                bfloat16* pair = into + first * TILE + half * 32;
                _mm512_store_si512(pair, _mm512_unpacklo_epi8(low, high));
                _mm512_store_si512(pair + 2 * TILE, _mm512_unpackhi_epi8(low, high));
            }
    }
#endif

#if defined(__AVX512BF16__)
    static void multiply(const bfloat16* x, int64_t rows, const bfloat16* tile, int64_t count, bool fresh, float* sums) {
        with_rows(rows, [&](auto m) {
            Sums made[m()];
            ::multiply<Dots, m()>(x, CHUNK, tile, count / 2, NothingAhead(), made);
            for (int row = 0; row < m(); ++row)
                for (int half = 0; half < 2; ++half) {
                    float* into = sums + row * TILE + half * 16;
                    _mm512_store_ps(into, fresh ? made[row][half] : _mm512_add_ps(made[row][half], _mm512_load_ps(into)));
                }
        });
    }
#endif
};

using Pairs = PairsOf<128>;
using LongPairs = PairsOf<256>;  // for more than ::ROWS rows

#endif

#if (defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))) && !defined(TRTFORGE_NARROW_VECTORS)
#define HAS_SHORTS 1

// sums + dot products of the two 16-bit integers in each word of a and b. VNNI needs one instruction instead of two.
static inline LaneIntegers add_pairs(LaneIntegers sums, LaneIntegers a, LaneIntegers b) {
#if defined(__AVX512VNNI__)
    return (LaneIntegers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sums + (LaneIntegers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (LaneIntegers)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#else
    return sums + (LaneIntegers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// Signed bytes `first` and `first` + 1 of each word, as two 16-bit integers.
template <int first>
static inline LaneIntegers pairs_of_bytes(LaneWords words) {
    typedef int16_t Halves __attribute__((vector_size(LANES * 4), may_alias));
    constexpr int FROM = first << 8 | (first + 1) << 24 | 0x00800080, STEP = 0x04000400;  // 0x80: a byte that is 0
    const __m128i in_quarter = _mm_setr_epi32(FROM, FROM + STEP, FROM + 2 * STEP, FROM + 3 * STEP);
#if defined(__AVX512BW__)
    const __m512i high = _mm512_shuffle_epi8((__m512i)words, _mm512_broadcast_i32x4(in_quarter));
#else
    const __m256i high = _mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(in_quarter));
#endif
    return (LaneIntegers)((Halves)high >> 8);
}

// INT8 weights and inputs rounded to INT8, as 16-bit integers: the processor multiplies twice as many of them as of float32.
// Sums over a chunk are exact in float32.
struct Shorts {
    using Input = int16_t;
    static constexpr int64_t CHUNK = 128;
    template <class Format>
    static constexpr float FACTOR = 1.0f;
    static constexpr int64_t ROWS = float32::ROWS, VECTORS = float32::VECTORS, WIDE = float32::WIDE;

    // To (count / 2, TILE, 2).
    template <class Format>
    static void expand(const uint32_t* from, int64_t count, const float*, int16_t* into) {
        static_assert(std::is_same_v<Format, FromBytes<Int8>>);
        for (int64_t first = 0; first < count; first += Format::INPUTS, into += Format::INPUTS * TILE)
            for (int64_t o = 0; o < TILE; o += LANES, from += LANES) {
                *(LaneIntegers*)(into + 2 * o) = pairs_of_bytes<0>(words(from));
                *(LaneIntegers*)(into + 2 * TILE + 2 * o) = pairs_of_bytes<2>(words(from));
            }
    }

    static void multiply(const int16_t* x, int64_t rows, const int16_t* tile, int64_t count, bool fresh, float* sums) {
        with_constant<ROWS>(rows, [&](auto m) {
            for (int64_t wide = 0; wide < TILE; wide += WIDE)
                multiply_rows<m()>(x, tile + 2 * wide, count, fresh, sums + wide);
        });
    }

    template <int M>
    static void multiply_rows(const int16_t* x, const int16_t* tile, int64_t count, bool fresh, float* sums) {
        LaneIntegers made[M][VECTORS];
        clear(made);
        for (int64_t at = 0; at < count; at += 2, tile += 2 * TILE) {
            LaneIntegers weights[VECTORS];
#pragma GCC unroll 4
            for (int64_t v = 0; v < VECTORS; ++v) weights[v] = *(const LaneIntegers*)(tile + 2 * v * LANES);
#pragma GCC unroll 12
            for (int m = 0; m < M; ++m) {
                int32_t pair;
                std::memcpy(&pair, x + m * CHUNK + at, sizeof pair);
                const LaneIntegers inputs = LaneIntegers() + pair;
#pragma GCC unroll 4
                for (int64_t v = 0; v < VECTORS; ++v) made[m][v] = add_pairs(made[m][v], weights[v], inputs);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int64_t v = 0; v < VECTORS; ++v) {
                float* into = sums + m * TILE + v * LANES;
                const Lanes total = __builtin_convertvector(made[m][v], Lanes);
                put_lanes(into, fresh ? total : *(const Lanes*)into + total);
            }
    }
};

#endif

}  // namespace expanded
