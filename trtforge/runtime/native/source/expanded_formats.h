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

// Members of a format: `WORDS` 32-bit words hold `INPUTS` inputs of a tile. `expand` calls put(input, half, value) for the
// vectors of weights, times `FACTOR`, in a vector of words; word i holds outputs i + half WORDS. `IN_BFLOAT16`: whether these
// are exact in bfloat16. `SCALED`: the layer's scales belong to blocks of 16 inputs, and weights times scales are exact in
// bfloat16, so products of several rows use scaled weights. `Single`: the format for products of a single row, whose weights
// are weight + `OFFSET`, times `POWERS[input]` if it has any.

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
    static inline __attribute__((always_inline)) void expand(LaneWords from, Put put) {
        put(0, 0, Number::of(from << 16));
        put(1, 0, Number::of(from & 0xffff0000u));
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
    static inline __attribute__((always_inline)) void expand(LaneWords from, Put put) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < INPUTS; ++i) put(i, 0, Number::of(from << (24 - 8 * i)));
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

// Calls f(input, half) for the nibbles of a word.
template <class F>
static inline __attribute__((always_inline)) void each_nibble(F f) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i)
#pragma GCC unroll 2
        for (int64_t half = 0; half < 2; ++half) f(i, half);
}

// Weights of 4 bits for a single row. `Codes::of` maps the low nibble of each byte to an integer from 0 on, in the bits MASK of
// the byte, which is converted at its position in the word: this saves shifts.
template <class Codes>
struct InPlace {
    static constexpr int64_t INPUTS = 4, WORDS = 16;
    static constexpr float FACTOR = Codes::FACTOR, OFFSET = Codes::OFFSET;
    static constexpr float POWERS[INPUTS] = {1.0f, 0x1p16f, 0x1p8f, 0x1p24f};
    template <class Put>
    static inline __attribute__((always_inline)) void expand(LaneWords from, Put put) {
        const LaneWords halves[2] = {Codes::of(from), Codes::of(from >> 4)};
        each_nibble([&](int64_t i, int64_t half) __attribute__((always_inline)) {
            const LaneWords codes = halves[half] & (Codes::MASK << NIBBLES[i]);
            put(i, half, __builtin_convertvector((LaneIntegers)codes, Lanes));
        });
    }
};

// Values plus 8.
struct Int4Codes {
    static constexpr uint32_t MASK = 0xf;
    static constexpr float FACTOR = 1.0f, OFFSET = 8.0f;
    static LaneWords of(LaneWords nibbles) { return nibbles; }
};

// INT4: flipping the highest bit of a nibble makes it a signed integer.
struct FromInt4 {
    using Single = InPlace<Int4Codes>;
    static constexpr int64_t INPUTS = 4, WORDS = 16;
    static constexpr float FACTOR = 0x1p28f;
    static constexpr bool IN_BFLOAT16 = true, SCALED = false;
    template <class Put>
    static inline __attribute__((always_inline)) void expand(LaneWords from, Put put) {
        const LaneWords signs = from ^ 0x88888888u;
        each_nibble([&](int64_t i, int64_t half) __attribute__((always_inline)) {
            const LaneWords high = (signs << (28 - NIBBLES[i] - 4 * half)) & 0xf0000000u;
            put(i, half, __builtin_convertvector((LaneIntegers)high, Lanes));
        });
    }
};

// FromE2m1: E2M1, the element type of NVFP4, in the layout of INT4.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(TRTFORGE_NARROW_VECTORS)

// Twice the number of each byte's low nibble, plus OFFSET.
template <int OFFSET>
static inline LaneWords doubled_e2m1(LaneWords nibbles) {
    constexpr int O = OFFSET;
    const __m128i numbers = _mm_setr_epi8(O, O + 1, O + 2, O + 3, O + 4, O + 6, O + 8, O + 12,  //
                                          O, O - 1, O - 2, O - 3, O - 4, O - 6, O - 8, O - 12);
    return (LaneWords)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), (__m256i)(nibbles & 0x0f0f0f0fu));
}

// Twice the numbers, plus 12.
struct E2m1Codes {
    static constexpr uint32_t MASK = 0xff;
    static constexpr float FACTOR = 2.0f, OFFSET = 12.0f;
    static LaneWords of(LaneWords nibbles) { return doubled_e2m1<int(OFFSET)>(nibbles); }
};

struct FromE2m1 {
    using Single = InPlace<E2m1Codes>;
    static constexpr int64_t INPUTS = 4, WORDS = 16;
    static constexpr float FACTOR = 0x1p25f;
    static constexpr bool IN_BFLOAT16 = true, SCALED = true;
    template <class Put>
    static inline __attribute__((always_inline)) void expand(LaneWords from, Put put) {
        const LaneWords halves[2] = {doubled_e2m1<0>(from), doubled_e2m1<0>(from >> 4)};
        each_nibble([&](int64_t i, int64_t half) __attribute__((always_inline)) {
            put(i, half, Int8::of(halves[half] << (24 - NIBBLES[i])));
        });
    }
};

#else

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
    static inline __attribute__((always_inline)) void expand(LaneWords from, Put put) {
        each_nibble([&](int64_t i, int64_t half) __attribute__((always_inline)) {
            put(i, half, of(from << (28 - NIBBLES[i] - 4 * half)));
        });
    }
};

#endif

// Calls put(input, output, value) for the vectors of weights, times FACTOR, of the next INPUTS inputs of a tile.
template <class Format, class Put>
static inline __attribute__((always_inline)) void expand_inputs(const uint32_t* from, Put put) {
#pragma GCC unroll 8
    for (int64_t o = 0; o < Format::WORDS; o += LANES)
        Format::expand(words(from + o), [&](int64_t i, int64_t half, Lanes v) __attribute__((always_inline)) {
            put(i, half * Format::WORDS + o, v);
        });
}

}  // namespace expanded
