// The weight formats that expanded.cpp expands (dequantises).
//
// Weights are packed in tiles of 32 outputs. Each 32-bit word holds inputs of one output:
//   bfloat16, float16  (outputs / 32, inputs / 2, 32, 2)  two inputs
//   int8, E4M3         (outputs / 32, inputs / 4, 32, 4)  four inputs
// INT4, E2M1: nibbles of two outputs, 16 apart, see matmul.cpp. Integers are expanded to their value times a power of two; the
// sums, or the inputs of a single row, are divided by it.

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

// Members of a format: `WORDS` 32-bit words hold `INPUTS` inputs of a tile. `expand` calls put(input, output, value) for
// vectors of weights times `FACTOR`; `IN_BFLOAT16`: whether these are exact in bfloat16. `SCALED`: the layer's scales belong
// to blocks of 16 inputs, and weights times scales are exact in bfloat16, so products of several rows use scaled weights.
// `Single`: the format for products of a single row, whose weights are weight + `OFFSET`, times `POWERS[input]` if it has any.

struct Bfloat16 {
    static Lanes of(LaneWords high) { return (Lanes)high; }
};

// The multiplication corrects the exponent bias: 127 instead of 15.
struct Float16 {
    static Lanes of(LaneWords high) {
        return (Lanes)(((LaneIntegers)high >> 3) & int32_t(0x8fffe000)) * 0x1p112f;
    }
};

// Two 16-bit weights per word. `Number` converts the high half of each word to float32, and ignores the low half.
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

// Four 8-bit weights per word. `Number` converts the highest byte of each word to float32.
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

// Moves the bits to their positions in float32; the multiplication corrects the exponent bias, 127 instead of 7.
struct E4m3 {
    static constexpr float FACTOR = 1.0f;
    static Lanes of(LaneWords high) { return (Lanes)(((LaneIntegers)high >> 4) & int32_t(0x87f00000)) * 0x1p120f; }
};

constexpr int64_t NIBBLES[] = {0, 16, 8, 24};  // bit position of the first of each input's two nibbles

// INT4 for a single row: nibbles are values plus 8. They are converted at their position in the word, which saves shifts.
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

// INT4: flipping the highest bit of a nibble makes it a signed integer.
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

// E2M1, the element type of NVFP4, in the layout of INT4.
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
    // Moves the bits to their positions in float32, whose exponent bias is 126 higher. A subnormal number is computed as 1 +
    // its mantissa, minus 1, because float32 computes slowly with subnormal numbers.
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
