// Number types of the kernels, and utilities that all kernels use.
//
// Matrices are row-major. Sizes and strides count elements. Arithmetic is in float32 for every storage type.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

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

// Rounds to nearest, ties to even; NaN stays NaN.
static inline void put(bfloat16* into, float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    into->bits = uint16_t(value != value ? 0x7fc0 : rounded);
}

// Number of elements from which a second thread pays off, at a few operations per element.
constexpr int64_t PARALLEL_FROM = 16384;

// Prefetches `count` elements into the L2 cache, which supports more outstanding misses than L1; the addresses may be invalid.
template <typename C>
static inline void prefetch(const C* from, int64_t count) {
    const char* bytes = (const char*)from;
    for (int64_t at = 0; at < count * int64_t(sizeof(C)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// Number of parts of at most `most` rows.
static inline int64_t parts(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

// Calls function(n) with `number`, at least 1 and limited to MOST, as a compile-time constant of type int.
template <int64_t MOST, class Function>
static inline void with_constant(int64_t number, Function function) {
    if constexpr (MOST > 1)
        if (number < MOST) return with_constant<MOST - 1>(number, function);
    function(std::integral_constant<int, int(MOST)>());
}

// Zeroes (nested) arrays of accumulators in registers; GCC would initialise these arrays in memory.
template <class V>
static inline __attribute__((always_inline)) void clear(V& sums) {
    sums = V{};
}

template <class Part, size_t N>
static inline __attribute__((always_inline)) void clear(Part (&sums)[N]) {
#pragma GCC unroll 16
    for (size_t i = 0; i < N; ++i) clear(sums[i]);
}

// Memory for `count` elements in a vector that only grows; the contents are undefined.
template <typename T>
static inline T* at_least(std::vector<T>& memory, int64_t count) {
    if (int64_t(memory.size()) < count) memory.resize(size_t(count));
    return memory.data();
}

// Like `at_least`, aligned to 64 bytes.
template <typename T>
static inline T* at_least_aligned(std::vector<T>& memory, int64_t count) {
    constexpr int64_t MORE = 64 / int64_t(sizeof(T));
    return (T*)((uintptr_t(at_least(memory, count + MORE)) + 63) / 64 * 64);
}

// Scratch memory of the calling thread for `count` elements, aligned to 64 bytes. All calls for one T share it.
template <typename T>
static inline T* memory_for(int64_t count) {
    static thread_local std::vector<T> memory;
    return at_least_aligned(memory, count);
}

// The first position that the token at `position` attends to, within the last `window` tokens and within its chunk of
// `chunk` tokens; 0 for no window or chunk.
static inline int64_t first_seen(int64_t position, int64_t window, int64_t chunk) {
    const int64_t of_window = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    return std::max(of_window, chunk > 0 ? position - position % chunk : 0);
}
