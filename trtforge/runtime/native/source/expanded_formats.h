// The formats of weights that expanded.cpp expands.
//
// Weights are packed in tiles of 32 outputs, of which each 32-bit word holds one output:
//   bfloat16, float16  (outputs / 32, inputs / 2, 32, 2)  two inputs
//   int8, E4M3         (outputs / 32, inputs / 4, 32, 4)  four inputs
// INT4, E2M1: nibbles of two outputs, 16 apart, as matmul.cpp describes. Integers become multiples of theirs by a power of
// two, for which the sums, or the inputs of a single row, are corrected.

#pragma once

#include "float32.h"
#include "vectors.h"

#include <type_traits>

namespace expanded {

using float32::LANES;
using float32::Lanes;
using float32::TILE;

typedef uint32_t LaneWords __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t LaneIntegers __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline LaneWords words(const void* from) { return *(const LaneWords*)from; }

// Each format: `WORDS` 32-bit words hold `INPUTS` inputs of a tile. `expand` calls put(input, output, value) for vectors of
// the weights times `FACTOR`; `IN_BFLOAT16`: whether bfloat16 holds them exactly. `SCALED`: the scales of a layer are those
// of blocks of 16 inputs, with which weights are exact in bfloat16 too, so that several rows take them scaled. `Single` is
// how a single row takes them: weights plus `OFFSET`, and times its `POWERS[input]` if it has such.

struct Bfloat16 {
    static Lanes of(LaneWords high) { return (Lanes)high; }
};

// The product corrects the exponent's bias, 127 instead of 15.
struct Float16 {
    static Lanes of(LaneWords high) {
        return (Lanes)(((LaneIntegers)high >> 3) & int32_t(0x8fffe000)) * 0x1p112f;
    }
};

// `Number` makes float32 numbers of what is in the higher half of a word, whose lower half it leaves out.
template <class Number>
struct FromHalves {
    using Single = FromHalves;
    static constexpr int64_t INPUTS = 2, WORDS = 32;
    static constexpr float FACTOR = 1.0f, OFFSET = 0.0f;
    static constexpr bool IN_BFLOAT16 = std::is_same_v<Number, Bfloat16>, SCALED = false;
    template <class Put>
    static inline __attribute__((always_inline)) void expand(const uint32_t* from, Put put) {
#pragma GCC unroll 8
        for (int64_t o = 0; o < TILE; o += LANES) {
            const LaneWords both = words(from + o);
            put(0, o, Number::of(both << 16));
            put(1, o, Number::of(both & 0xffff0000u));
        }
    }
};

// `Number` makes float32 numbers of bytes that are the highest of their words.
template <class Number>
struct FromBytes {
    using Single = FromBytes;
    static constexpr int64_t INPUTS = 4, WORDS = 32;
    static constexpr float FACTOR = Number::FACTOR, OFFSET = 0.0f;
    static constexpr bool IN_BFLOAT16 = true, SCALED = false;
    template <class Put>
    static inline __attribute__((always_inline)) void expand(const uint32_t* from, Put put) {
#pragma GCC unroll 8
        for (int64_t o = 0; o < TILE; o += LANES) {
            const LaneWords four = words(from + o);
#pragma GCC unroll 4
            for (int64_t i = 0; i < INPUTS; ++i) put(i, o, Number::of(four << (24 - 8 * i)));
        }
    }
};

struct Int8 {
    static constexpr float FACTOR = 0x1p24f;
    static Lanes of(LaneWords high) { return __builtin_convertvector((LaneIntegers)(high & 0xff000000u), Lanes); }
};

// The bits move to their places in float32; the product corrects the exponent's bias, 127 instead of 7.
struct E4m3 {
    static constexpr float FACTOR = 1.0f;
    static Lanes of(LaneWords high) { return (Lanes)(((LaneIntegers)high >> 4) & int32_t(0x87f00000)) * 0x1p120f; }
};

constexpr int64_t NIBBLES[] = {0, 16, 8, 24};  // where the first of an input's two nibbles begins

// Nibbles are values plus 8. They stay where they are in their words, so that no instruction moves them.
struct NibblesInPlace {
    static constexpr int64_t INPUTS = 4, WORDS = 16;
    static constexpr float FACTOR = 1.0f, OFFSET = 8.0f;
    static constexpr float POWERS[INPUTS] = {1.0f, 0x1p16f, 0x1p8f, 0x1p24f};
    template <class Put>
    static inline __attribute__((always_inline)) void expand(const uint32_t* from, Put put) {
#pragma GCC unroll 4
        for (int64_t o = 0; o < WORDS; o += LANES) {
            const LaneWords first = words(from + o), halves[2] = {first, first >> 4};
#pragma GCC unroll 4
            for (int64_t i = 0; i < INPUTS; ++i)
#pragma GCC unroll 2
                for (int64_t half = 0; half < 2; ++half) {
                    const LaneWords nibbles = halves[half] & (0xfu << NIBBLES[i]);
                    put(i, half * WORDS + o, __builtin_convertvector((LaneIntegers)nibbles, Lanes));
                }
        }
    }
};

// With the highest bit turned, nibbles are signed.
struct FromInt4 {
    using Single = NibblesInPlace;
    static constexpr int64_t INPUTS = 4, WORDS = 16;
    static constexpr float FACTOR = 0x1p28f;
    static constexpr bool IN_BFLOAT16 = true, SCALED = false;
    template <class Put>
    static inline __attribute__((always_inline)) void expand(const uint32_t* from, Put put) {
#pragma GCC unroll 4
        for (int64_t o = 0; o < WORDS; o += LANES) {
            const LaneWords signs = words(from + o) ^ 0x88888888u;
#pragma GCC unroll 4
            for (int64_t i = 0; i < INPUTS; ++i)
#pragma GCC unroll 2
                for (int64_t half = 0; half < 2; ++half) {
                    const LaneWords high = (signs << (28 - NIBBLES[i] - 4 * half)) & 0xf0000000u;
                    put(i, half * WORDS + o, __builtin_convertvector((LaneIntegers)high, Lanes));
                }
        }
    }
};

// E2M1, the elements of NVFP4, in the places of INT4's.
struct FromE2m1 {
    using Single = FromE2m1;
    static constexpr int64_t INPUTS = 4, WORDS = 16;
    static constexpr float FACTOR = 1.0f, OFFSET = 0.0f;
    static constexpr bool IN_BFLOAT16 = true, SCALED = true;

#if defined(__AVX512F__) && !defined(TRTFORGE_NARROW_VECTORS)
    static Lanes of(LaneWords high) {
        const __m512 numbers = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
        return (Lanes)_mm512_permutexvar_ps((__m512i)(high >> 28), numbers);
    }
#else
    // The bits move to their places in float32, whose exponents are 126 higher. Of a subnormal number the mantissa
    // alone is left of one between 1 and 2: float32 has subnormal numbers too, but computes with them slowly.
    static Lanes of(LaneWords high) {
        const LaneWords bits = (high >> 6) & 0x01c00000u;
        const Lanes normal = (Lanes)(bits + 0x3f000000u), subnormal = (Lanes)((bits & 0x00400000u) | 0x3f800000u) - 1.0f;
        const Lanes size = (bits & 0x01800000u) != 0 ? normal : subnormal;
        return (Lanes)((LaneWords)size | (high & 0x80000000u));
    }
#endif

    template <class Put>
    static inline __attribute__((always_inline)) void expand(const uint32_t* from, Put put) {
#pragma GCC unroll 4
        for (int64_t o = 0; o < WORDS; o += LANES) {
            const LaneWords first = words(from + o);
#pragma GCC unroll 4
            for (int64_t i = 0; i < INPUTS; ++i)
#pragma GCC unroll 2
                for (int64_t half = 0; half < 2; ++half)
                    put(i, half * WORDS + o, of(first << (28 - NIBBLES[i] - 4 * half)));
        }
    }
};

}  // namespace expanded
