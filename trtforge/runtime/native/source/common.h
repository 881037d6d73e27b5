// Number types of the kernels and what all of them use.
//
// Matrices are row-major. Sizes and strides count elements. Arithmetic is float32, whatever the storage type.

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

// Rounds to nearest, ties to even; not-a-number stays one.
static inline void put(bfloat16* into, float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    into->bits = uint16_t(value != value ? 0x7fc0 : rounded);
}

// Elements from which a second thread pays, where each takes a few operations.
constexpr int64_t PARALLEL_FROM = 16384;

// Fetches `count` numbers into the second-level cache, which waits for more lines at once than the first; they need not
// exist.
template <typename C>
static inline void prefetch(const C* from, int64_t count) {
    const char* bytes = (const char*)from;
    for (int64_t at = 0; at < count * int64_t(sizeof(C)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// Parts of at most `most` rows.
static inline int64_t parts(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

// Calls function(n) with a number from 1 on as a compile-time constant of int, MOST for all that are larger.
template <int64_t MOST, class Function>
static inline void with_constant(int64_t number, Function function) {
    if constexpr (MOST > 1)
        if (number < MOST) return with_constant<MOST - 1>(number, function);
    function(std::integral_constant<int, int(MOST)>());
}

// Sets sums, in arrays of arrays, to zero in their registers; GCC initialises such arrays in memory.
template <class V>
static inline __attribute__((always_inline)) void clear(V& sums) {
    sums = V{};
}

template <class Part, size_t N>
static inline __attribute__((always_inline)) void clear(Part (&sums)[N]) {
#pragma GCC unroll 16
    for (size_t i = 0; i < N; ++i) clear(sums[i]);
}

// Room for so many numbers in memory that grows, and is not cleared.
template <typename T>
static inline T* at_least(std::vector<T>& memory, int64_t count) {
    if (int64_t(memory.size()) < count) memory.resize(size_t(count));
    return memory.data();
}

// The same, aligned to a vector.
template <typename T>
static inline T* at_least_aligned(std::vector<T>& memory, int64_t count) {
    constexpr int64_t MORE = 64 / int64_t(sizeof(T));
    return (T*)((uintptr_t(at_least(memory, count + MORE)) + 63) / 64 * 64);
}

// Room for so many numbers that the calling thread keeps, aligned to a vector.
template <typename T>
static inline T* memory_for(int64_t count) {
    static thread_local std::vector<T> memory;
    return at_least_aligned(memory, count);
}

// The first position that the token at `position` attends to: of the last `window`, and of its own chunk; 0 for all.
static inline int64_t first_seen(int64_t position, int64_t window, int64_t chunk) {
    const int64_t of_window = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    return std::max(of_window, chunk > 0 ? position - position % chunk : 0);
}
