// Number types of the kernels and what all of them use.
//
// Matrices are row-major. Sizes and strides count elements. Arithmetic is float32, whatever the storage type.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Storage type of activations, as `bindings.TYPES` numbers them.
enum Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

struct bfloat16 {
    uint16_t bits;
};

static inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float to_float(float value) { return value; }

static inline float to_float(bfloat16 value) { return from_bits(uint32_t(value.bits) << 16); }

static inline void put(float* into, float value) { *into = value; }

// Rounds to nearest, ties to even; not-a-number stays one.
static inline void put(bfloat16* into, float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    into->bits = uint16_t(value != value ? 0x7fc0 : rounded);
}

// exp(x), with a relative error below 2e-7: 2^n times a polynomial of the rest (Cephes, expf). Loops over it vectorise.
// Not-a-number stays one: std::min and std::max return their first argument if it is one.
static inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::floor(x * 1.44269504f + 0.5f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * from_bits(uint32_t(int32_t(n) + 127) << 23);
}
