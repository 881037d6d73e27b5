// Attention of one token over a bfloat16 cache with bfloat16 products, 32 elements of a vector at a time.

#pragma once

#include "attention.h"
#include "products.h"

#if defined(HAS_PRODUCTS)

namespace attention {

constexpr int64_t DEPTH = 32;  // elements of a vector; divides the size of a head

// sums (G, W x 2) += weights (G, row stride `count`) of two tokens times their values; `second` is null without a second
// token. For every 32 elements, the first sums have the even ones and the second sums the odd ones.
template <int G, int W>
static inline void add_values(MultiplyAdds, const float* weights, int64_t count, const bfloat16* first,
                              const bfloat16* second, __m512 (&sums)[G][2 * W]) {
    const auto add = [&](const bfloat16* values, const float* weight) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) {
            const MultiplyAdds::Weights value(_mm512_loadu_si512(values + w * DEPTH));
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
                const __m512 factor = _mm512_set1_ps(weight[g * count]);
                sums[g][2 * w] = _mm512_fmadd_ps(value.even, factor, sums[g][2 * w]);
                sums[g][2 * w + 1] = _mm512_fmadd_ps(value.odd, factor, sums[g][2 * w + 1]);
            }
        }
    };
    add(first, weights);
    if (second) add(second, weights + 1);
}

// Indices of the first 16 of 32 values in the sums of `add_values`; add 8 to each for the other 16.
static inline __m512i places(MultiplyAdds) {
    return _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
}

#if defined(__AVX512BF16__)

// The same with dot products of pairs, the values of two tokens. The first sums have elements 0 to 3, 8 to 11, ... of 32, and
// the second sums the others.
template <int G, int W>
static inline void add_values(Dots, const bfloat16* weights, int64_t count, const bfloat16* first,
                              const bfloat16* second, __m512 (&sums)[G][2 * W]) {
    __m512bh weight[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) weight[g] = both(weights + g * count);
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
        const __m512i own = _mm512_loadu_si512(first + w * DEPTH);
        const __m512i other = second ? _mm512_loadu_si512(second + w * DEPTH) : _mm512_setzero_si512();
        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(own, other);
        const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(own, other);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            sums[g][2 * w] = _mm512_dpbf16_ps(sums[g][2 * w], low, weight[g]);
            sums[g][2 * w + 1] = _mm512_dpbf16_ps(sums[g][2 * w + 1], high, weight[g]);
        }
    }
}

static inline __m512i places(Dots) {
    return _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
}

// Rounds `count` probabilities, a multiple of 16, to bfloat16.
static inline void round_weights(const float* from, int64_t count, bfloat16* into) {
    for (int64_t i = 0; i < count; i += 16)
        _mm256_storeu_si256((__m256i*)(into + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
}

#endif

// out (32): the sums of `add_values`, in the order of the elements.
template <class Way>
static inline void put_values(const float* sums, bfloat16* out) {
    const __m512i front = places(Way()), back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
    const __m512 first = _mm512_loadu_ps(sums), second = _mm512_loadu_ps(sums + 16);
    put(out, (Vector)_mm512_permutex2var_ps(first, front, second));
    put(out + 16, (Vector)_mm512_permutex2var_ps(first, back, second));
}

// Adds the weights (G, row stride `pitch`) times the values of a run to `into` (G, row stride `size`), for 32 W elements of a
// value in the order of `add_values`, while prefetching `lines`.
template <class Way, int G, int W>
static void add_run(const typename Way::Input* weights, int64_t pitch, const Run<bfloat16>& run, Lines lines,
                    int64_t size, float* into) {
    __m512 sums[G][2 * W];
    for (int g = 0; g < G; ++g)
        for (int half = 0; half < 2 * W; ++half) sums[g][half] = _mm512_loadu_ps(into + g * size + half * WIDTH);
    for (int64_t token = 0; token < run.tokens; token += 2) {
        lines.step();
        lines.step();
        const bfloat16* second = token + 1 < run.tokens ? run.at(token + 1) : nullptr;
        add_values<G, W>(Way(), weights + token, pitch, run.at(token), second, sums);
    }
    for (int g = 0; g < G; ++g)
        for (int half = 0; half < 2 * W; ++half) _mm512_storeu_ps(into + g * size + half * WIDTH, sums[g][half]);
}

// The probabilities in the type that the way to multiply reads: float32, or rounded to bfloat16 (Dao et al. 2022).
static inline const float* weights_of(MultiplyAdds, const float* scores, int64_t, Memory&) { return scores; }

#if defined(__AVX512BF16__)
static inline const bfloat16* weights_of(Dots, const float* scores, int64_t count, Memory& memory) {
    bfloat16* weights = at_least(memory.halves, count);
    round_weights(scores, count, weights);
    return weights;
}
#endif

// For bfloat16 queries; `W` is the way to multiply (products.h). Sizes are multiples of DEPTH. Members are those of `Floats`.
template <class W>
struct Pairs {
    using Cached = bfloat16;
    using Query = bfloat16;
    using Weight = typename W::Input;

    static const bfloat16* queries(const Rows& p, int64_t row, Memory&) {
        return (const bfloat16*)p.queries + row * p.stride;
    }

    template <int G>
    static constexpr int64_t KEYS = 16 / G;

    // Writes KEYS scores of each query; those of missing keys are overwritten later.
    template <int G>
    static void score(const bfloat16* queries, const bfloat16* key, int64_t stride, int64_t keys, int64_t size,
                      float scale, int64_t pitch, float* scores) {
        constexpr int K = KEYS<G>;
        using Numbers = typename W::Weights;
        __m512 sums[16] = {};
        const bfloat16* of[K];
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) of[k] = key + (k < keys ? k : 0) * stride;
        for (int64_t d = 0; d < size; d += DEPTH) {
            Numbers query[G];
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) query[g] = Numbers(_mm512_loadu_si512(queries + g * size + d));
#pragma GCC unroll 16
            for (int k = 0; k < K; ++k) {
                const Numbers part(_mm512_loadu_si512(of[k] + d));
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g) sums[g * K + k] = W::add(sums[g * K + k], query[g], part);
            }
        }
        alignas(64) float found[16];
        _mm512_store_ps(found, _mm512_mul_ps(sums_of_each(sums), _mm512_set1_ps(scale)));
        for (int g = 0; g < G; ++g) std::memcpy(scores + g * pitch, found + g * K, K * sizeof(float));
    }

    static const Weight* weights(const float* scores, int64_t count, Memory& memory) {
        return weights_of(W(), scores, count, memory);
    }

    template <int G>
    static void weigh(const Weight* weights, int64_t pitch, const Run<bfloat16>& run, const Lines& lines,
                      int64_t size, float* into) {
        int64_t d = 0;
        const auto fetched = [&] { return d == 0 ? lines : Lines(); };
        for (; d + 64 <= size; d += 64) add_run<W, G, 2>(weights, pitch, run.from(d), fetched(), size, into + d);
        for (; d < size; d += 32) add_run<W, G, 1>(weights, pitch, run.from(d), fetched(), size, into + d);
    }

    static void put_all(const Rows& p, const float* sums, int64_t first) {
        for (int64_t d = 0; d < p.size; d += DEPTH) put_values<W>(sums + d, (bfloat16*)p.out + first + d);
    }
};

}  // namespace attention

#endif
