// Sixteen float32 at once, by the compiler's vector extensions: one register with AVX512, several elsewhere.

#pragma once

#include "common.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// An 8-bit float with 4 exponent and 3 mantissa bits (Micikevicius et al. 2022); not-a-number is never stored.
struct e4m3 {
    uint8_t bits;
};

// Storage type of the KV cache, as `bindings.CACHES` numbers them.
enum Cache : int64_t { CACHE_FLOAT32 = 0, CACHE_BFLOAT16 = 1, CACHE_INT8 = 2, CACHE_E4M3 = 3 };

constexpr int64_t WIDTH = 16;

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));

typedef int32_t Integers __attribute__((vector_size(64), aligned(4), may_alias));

template <typename T>
struct Sixteen {
    typedef T type __attribute__((vector_size(16 * sizeof(T)), aligned(1), may_alias));
};

static inline Vector load(const float* from) { return *(const Vector*)from; }

static inline Vector load(const bfloat16* from) {
    return (Vector)(__builtin_convertvector(*(const Sixteen<uint16_t>::type*)from, Words) << 16);
}

static inline Vector load(const int8_t* from) {
    return __builtin_convertvector(*(const Sixteen<int8_t>::type*)from, Vector);
}

// The bits move to their places in float32; the product corrects the exponent's bias, 127 instead of 7.
static inline Vector load(const e4m3* from) {
    const Words bits = __builtin_convertvector(*(const Sixteen<uint8_t>::type*)from, Words);
    return (Vector)(((bits & 0x80) << 24) | ((bits & 0x7f) << 20)) * 0x1p120f;
}

static inline void put(float* into, Vector value) { *(Vector*)into = value; }

static inline void put(bfloat16* into, Vector value) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)into, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
    const Words bits = (Words)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words kept = value == value ? rounded : Words() + 0x7fc0;
    *(Sixteen<uint16_t>::type*)into = __builtin_convertvector(kept, Sixteen<uint16_t>::type);
#endif
}

// 2^n for a whole n.
static inline float power_of_two(float n) { return from_bits(uint32_t(int32_t(n) + 127) << 23); }

static inline Vector power_of_two(Vector n) {
    return (Vector)((__builtin_convertvector(n, Integers) + 127) << 23);
}

// exp(x) of a float or of a Vector, with a relative error below 2e-7: 2^n times a polynomial of the rest (Cephes,
// expf). Not-a-number stays one.
template <typename V>
static inline V exponential(V x) {
    const V lowest = V() - 87.0f, largest = V() + 88.0f;
    x = x < lowest ? lowest : x;
    x = x > largest ? largest : x;
    const V n = (x * 1.44269504f + 0x1.8p23f) - 0x1.8p23f;  // rounds to a whole number
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * power_of_two(n);
}

static inline float sum(Vector v) {
    typedef float Half __attribute__((vector_size(32)));
    typedef float Quarter __attribute__((vector_size(16)));
    Half halves[2];
    std::memcpy(halves, &v, sizeof v);
    const Half half = halves[0] + halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, &half, sizeof half);
    const Quarter quarter = quarters[0] + quarters[1];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}
