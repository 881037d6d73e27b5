// Writes keys and values of new tokens to their slots in the KV cache.

#include "vectors.h"

// Copies values (tokens, bytes), with a token stride of `stride` bytes, to the tokens' slots in the cache.
EXPORT void write_slots(const char* values, int64_t stride, const int64_t* slots, int64_t tokens, int64_t bytes,
                        char* cache) {
    for (int64_t token = 0; token < tokens; ++token)
        std::memcpy(cache + slots[token] * bytes, values + token * stride, size_t(bytes));
}

// Stores value / scale, rounded to nearest, ties to even, and saturated.
static inline void store(int8_t* into, float value, float scale) {
    *into = int8_t(std::nearbyint(std::min(127.0f, std::max(-128.0f, value / scale))));
}

static inline void store(e4m3* into, float value, float scale) {
    const float exact = value / scale;
    const uint32_t sign = to_bits(exact) >> 24 & 0x80;
    const float magnitude = std::min(448.0f, std::fabs(exact));
    const uint32_t bits = to_bits(magnitude), rounded = bits + 0x7ffff + ((bits >> 20) & 1);
    // E4M3 numbers below 2^-6 are multiples of 2^-9. The exponent bias is 7 instead of 127.
    const uint32_t code = magnitude < 0x1p-6f ? uint32_t(std::nearbyint(magnitude * 0x1p9f)) : (rounded >> 20) - 120 * 8;
    into->bits = uint8_t(sign | (exact != exact ? 0x7f : code));
}

template <typename T, typename C>
static void store_slots(const T* values, int64_t stride, const int64_t* slots, int64_t tokens, int64_t count, C* cache,
                        float scale) {
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t i = 0; i < count; ++i) store(cache + slots[token] * count + i, to_float(values[token * stride + i]), scale);
}

template <typename T>
static void store_any(int64_t cache_type, const T* values, int64_t stride, const int64_t* slots, int64_t tokens,
                      int64_t count, void* cache, float scale) {
    if (cache_type == CACHE_INT8)
        store_slots(values, stride, slots, tokens, count, (int8_t*)cache, scale);
    else
        store_slots(values, stride, slots, tokens, count, (e4m3*)cache, scale);
}

// Like `write_slots`, for an INT8 or E4M3 cache: values (tokens, count), with a token stride of `stride` elements.
EXPORT void quantize_slots(int64_t type, int64_t cache_type, const void* values, int64_t stride, const int64_t* slots,
                           int64_t tokens, int64_t count, void* cache, float scale) {
    if (type == FLOAT32)
        store_any(cache_type, (const float*)values, stride, slots, tokens, count, cache, scale);
    else
        store_any(cache_type, (const bfloat16*)values, stride, slots, tokens, count, cache, scale);
}
