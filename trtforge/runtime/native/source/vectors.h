// Vectors of as many float32 as fit in a register of the processor, by the compiler's vector extensions.

#pragma once

#include "common.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

// An 8-bit float with 4 exponent and 3 mantissa bits (Micikevicius et al. 2022).
struct e4m3 {
    uint8_t bits;
};

// Storage types of the KV cache, numbered like `bindings.CACHES`.
enum Cache : int64_t { CACHE_FLOAT32 = 0, CACHE_BFLOAT16 = 1, CACHE_INT8 = 2, CACHE_E4M3 = 3 };

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 4;
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

typedef int32_t Integers __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

// A vector of WIDTH elements of another type.
template <typename T>
struct Several {
    typedef T type __attribute__((vector_size(WIDTH * sizeof(T)), aligned(1), may_alias));
};

static inline Vector load(const float* from) { return *(const Vector*)from; }

// Converts integers to 32 bits. GCC 12 emits vector instructions for doubling the width once, or twice in two steps, but not
// for quadrupling it in one step.
#if defined(__AVX512F__)
static inline Words widened(const uint16_t* from) {
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}

static inline Words widened(const uint8_t* from) {
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}

static inline Integers widened(const int8_t* from) {
    return (Integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
}
#elif defined(__AVX2__)
static inline Words widened(const uint16_t* from) {
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}

static inline Words widened(const uint8_t* from) {
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
}

static inline Integers widened(const int8_t* from) {
    return (Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
#else
static inline Words widened(const uint16_t* from) {
    return __builtin_convertvector(*(const Several<uint16_t>::type*)from, Words);
}

static inline Words widened(const uint8_t* from) {
    typedef Several<uint16_t>::type Halfway;
    return __builtin_convertvector(__builtin_convertvector(*(const Several<uint8_t>::type*)from, Halfway), Words);
}

static inline Integers widened(const int8_t* from) {
    typedef Several<int16_t>::type Halfway;
    return __builtin_convertvector(__builtin_convertvector(*(const Several<int8_t>::type*)from, Halfway), Integers);
}
#endif

static inline Vector load(const bfloat16* from) { return (Vector)(widened((const uint16_t*)from) << 16); }

static inline Vector load(const int8_t* from) { return __builtin_convertvector(widened(from), Vector); }

// Moves the bits to their positions in float32; the multiplication corrects the exponent bias, 127 instead of 7. NaN codes
// become 480 or -480.
static inline Vector load(const e4m3* from) {
    const Words bits = widened((const uint8_t*)from);
    return (Vector)(((bits & 0x80) << 24) | ((bits & 0x7f) << 20)) * 0x1p120f;
}

static inline void put(float* into, Vector value) { *(Vector*)into = value; }

static inline void put(bfloat16* into, Vector value) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)into, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
    const Words bits = (Words)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words kept = value == value ? rounded : Words() + 0x7fc0;
    *(Several<uint16_t>::type*)into = __builtin_convertvector(kept, Several<uint16_t>::type);
#endif
}

// For integral values.
static inline void put(int16_t* into, Vector value) {
    const Integers whole = __builtin_convertvector(value, Integers);
    *(Several<int16_t>::type*)into = __builtin_convertvector(whole, Several<int16_t>::type);
}

// Stores two vectors, one after the other.
template <typename T>
static inline void put(T* into, Vector low, Vector high) {
    put(into, low);
    put(into + WIDTH, high);
}

#if defined(__AVX512BF16__)
static inline void put(bfloat16* into, Vector low, Vector high) {  // writes a whole cache line
    _mm512_storeu_si512(into, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#endif

// 2^n for an integral n.
static inline float power_of_two(float n) { return from_bits(uint32_t(int32_t(n) + 127) << 23); }

static inline Vector power_of_two(Vector n) {
    return (Vector)((__builtin_convertvector(n, Integers) + 127) << 23);
}

// exp(x) of a float or a Vector, with a relative error below 2e-7: 2^n times a polynomial of the remainder (Cephes, expf). NaN
// stays NaN.
template <typename V>
static inline V exponential(V x) {
    const V lowest = V() - 87.0f, largest = V() + 88.0f;
    x = x < lowest ? lowest : x;
    x = x > largest ? largest : x;
    const V n = (x * 1.44269504f + 0x1.8p23f) - 0x1.8p23f;  // rounds to an integer
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * power_of_two(n);
}

// Whether a comparison is true in any lane.
static inline bool any(Integers found) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)found, (__m512i)found) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)found) != 0;
#else
    int32_t all = 0;
    for (int64_t lane = 0; lane < WIDTH; ++lane) all |= found[lane];
    return all != 0;
#endif
}

static inline float largest_lane(Vector v) {
    float largest = v[0];
    for (int64_t lane = 1; lane < WIDTH; ++lane) largest = std::max(largest, float(v[lane]));
    return largest;
}

// log(x) of positive normal numbers, with a relative error below 3e-7 (Cephes, logf).
static inline Vector logarithm(Vector x) {
    const Words bits = (Words)x;
    const Vector half = (Vector)((bits & 0x7fffff) | 0x3f000000);  // x = half 2^n, half in [1/2, 1)
    const Vector n = __builtin_convertvector((Integers)(bits >> 23) - 126, Vector);
    const auto low = half < 0.707106781f;
    const Vector m = low ? half + half - 1.0f : half - 1.0f, e = low ? n - 1.0f : n, z = m * m;
    Vector p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    return (m + (p * m * z - e * 2.12194440e-4f - z * 0.5f)) + e * 0.693359375f;
}

template <typename V>
static inline V silu(V x) {
    return x / (1.0f + exponential(-x));
}

// The lowest bits of x, moved to the position of the exponent.
static inline float as_exponent(float x) { return from_bits(to_bits(x) << 23); }

static inline Vector as_exponent(Vector x) { return (Vector)((Words)x << 23); }

static inline float absolute(float x) { return std::fabs(x); }

static inline Vector absolute(Vector x) { return (Vector)((Words)x & 0x7fffffff); }

// The minimum and the maximum; NaN if x is NaN.
static inline float smaller(float limit, float x) { return x > limit ? limit : x; }

static inline float larger(float limit, float x) { return x < limit ? limit : x; }

#if defined(__AVX512F__)
static inline Vector smaller(float limit, Vector x) {
    return (Vector)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)x);
}

static inline Vector larger(float limit, Vector x) { return (Vector)_mm512_max_ps(_mm512_set1_ps(limit), (__m512)x); }
#else
static inline Vector smaller(float limit, Vector x) { return x > limit ? Vector() + limit : x; }

static inline Vector larger(float limit, Vector x) { return x < limit ? Vector() + limit : x; }
#endif

// 2^x of a float or a Vector for x from -126 to 127, with a relative error below 2e-7: 2^n times a minimax polynomial of the
// remainder. NaN stays NaN.
template <typename V>
static inline V exponential_of_two(V x) {
    const V shifted = x + (0x1.8p23f + 127.0f);  // rounds to an integer; the lowest bits are those of n + 127
    const V r = x - (shifted - (0x1.8p23f + 127.0f));
    V p = r * 1.32647261e-3f + 9.67151299e-3f;
    p = p * r + 5.55073358e-2f;
    p = p * r + 2.40222424e-1f;
    p = p * r + 6.93147004e-1f;
    p = p * r + 1.0f;
    return p * as_exponent(shifted);
}

constexpr float LOG2_E = 1.44269504f;

// 2^x = exp(x / LOG2_E) for x <= 0, of a float or a Vector.
template <typename V>
static inline V power_of_negative(V x) {
    return exponential_of_two(larger(-126.0f, x));
}

static inline float sum(Vector v) {
    typedef float Quarter __attribute__((vector_size(16)));
    Quarter quarters[WIDTH / 4];
    std::memcpy(quarters, &v, sizeof v);
    for (int64_t count = WIDTH / 4; count > 1; count /= 2)
        for (int64_t i = 0; i < count / 2; ++i) quarters[i] += quarters[i + count / 2];
    const Quarter quarter = quarters[0];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// The largest element of a vector.
static inline float largest_of(Vector v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float largest = v[0];
    for (int64_t i = 1; i < WIDTH; ++i) largest = std::max(largest, v[i]);
    return largest;
#endif
}

#if defined(__AVX512F__)

// Lane i is the sum of v[i]. Halves are added, then quarters, pairs and single lanes.
static inline __m512 sums_of_each(__m512 (&v)[16]) {
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    const __m512i low_pairs = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i high_pairs = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_permutex2var_pd(a, low_pairs, b)),
                             _mm512_castpd_ps(_mm512_permutex2var_pd(a, high_pairs, b)));
    }
    return _mm512_add_ps(_mm512_permutex2var_ps(v[0], evens, v[1]), _mm512_permutex2var_ps(v[0], odds, v[1]));
}

static inline Vector sums_of(Vector (&v)[16]) { return (Vector)sums_of_each((__m512(&)[16])v); }

// Transposes rows of WIDTH floats or 32-bit words in place.
static inline void transpose(Vector (&rows)[16]) {
    __m512 parts[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        parts[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        parts[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
        for (int odd = 0; odd < 2; ++odd) {  // rows[i + j]: in its lane l, column 4 l + j of the rows from i on
            const __m512d a = (__m512d)parts[i + odd], b = (__m512d)parts[i + 2 + odd];
            rows[i + 2 * odd] = (Vector)_mm512_unpacklo_pd(a, b);
            rows[i + 2 * odd + 1] = (Vector)_mm512_unpackhi_pd(a, b);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512 first = (__m512)rows[j], second = (__m512)rows[4 + j];
        const __m512 third = (__m512)rows[8 + j], fourth = (__m512)rows[12 + j];
        const __m512 a = _mm512_shuffle_f32x4(first, second, 0x88);  // lanes 0 and 2 of both
        const __m512 b = _mm512_shuffle_f32x4(first, second, 0xdd);  // lanes 1 and 3
        const __m512 c = _mm512_shuffle_f32x4(third, fourth, 0x88);
        const __m512 d = _mm512_shuffle_f32x4(third, fourth, 0xdd);
        parts[j] = _mm512_shuffle_f32x4(a, c, 0x88);
        parts[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
        parts[8 + j] = _mm512_shuffle_f32x4(a, c, 0xdd);
        parts[12 + j] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; ++i) rows[i] = (Vector)parts[i];
}

#elif defined(__AVX__)

// Lane i is the sum of v[i]. Neighbours are added, then pairs, then halves.
static inline Vector sums_of(Vector (&v)[8]) {
    __m256 pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) pairs[i] = _mm256_hadd_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    const __m256 first = _mm256_hadd_ps(pairs[0], pairs[1]), second = _mm256_hadd_ps(pairs[2], pairs[3]);
    return (Vector)_mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                                 _mm256_permute2f128_ps(first, second, 0x31));
}

// Transposes rows of WIDTH floats in place.
static inline void transpose(Vector (&rows)[8]) {
    __m256 pairs[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd)
#pragma GCC unroll 2
        for (int high = 0; high < 2; ++high) {  // columns j and 4 + j
            const auto quarter = [&](int i) {
                const __m256d a = (__m256d)pairs[i + odd], b = (__m256d)pairs[i + 2 + odd];
                return (__m256)(high ? _mm256_unpackhi_pd(a, b) : _mm256_unpacklo_pd(a, b));
            };
            const __m256 low = quarter(0), rest = quarter(4);
            const int j = 2 * odd + high;
            rows[j] = (Vector)_mm256_permute2f128_ps(low, rest, 0x20);
            rows[4 + j] = (Vector)_mm256_permute2f128_ps(low, rest, 0x31);
        }
}

#else

static inline Vector sums_of(Vector (&v)[4]) { return Vector{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])}; }

// Transposes rows of WIDTH floats in place.
static inline void transpose(Vector (&rows)[4]) {
    const Vector a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    for (int i = 0; i < 4; ++i) rows[i] = Vector{a[i], b[i], c[i], d[i]};
}

#endif
