// Sixteen float32 at once, by the compiler's vector extensions: one register with AVX512, several elsewhere.

#pragma once

#include "common.h"

// An 8-bit float with 4 exponent and 3 mantissa bits (Micikevicius et al. 2022); not-a-number is never stored.
struct e4m3 {
    uint8_t bits;
};

constexpr int64_t WIDTH = 16;

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));

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
