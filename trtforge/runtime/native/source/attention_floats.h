// Attention of one token with float32 arithmetic, for any processor.

#pragma once

#include "attention.h"

namespace attention {

// SUMS: accumulators of scores that are in registers and reduced together. VALUES: vectors of a value that are accumulated in
// registers at once.
#if defined(__AVX512F__)
constexpr int SUMS = 16, VALUES = 4;
#elif defined(__AVX__)
constexpr int SUMS = 8, VALUES = 2;
#else
constexpr int SUMS = 4, VALUES = 2;
#endif

// Adds the weights (G, row stride `pitch`) times the values of a run to `into` (G, row stride `size`), for W vectors of a
// value, while prefetching `lines`.
template <int G, int W, typename C>
static void add_run(const float* weights, int64_t pitch, const Run<C>& run, Lines lines, int64_t size, float* into) {
    Vector sums[G][W];
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) sums[g][w] = load(into + g * size + w * WIDTH);
    for (int64_t token = 0; token < run.tokens; ++token) {
        const C* value = run.at(token);
        lines.step();
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            const Vector part = load(value + w * WIDTH);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) sums[g][w] += weights[g * pitch + token] * part;
        }
    }
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) put(into + g * size + w * WIDTH, sums[g][w]);
}

// For a cache with elements of type C. bfloat16 queries are converted to float32, and results rounded to bfloat16.
template <typename C>
struct Floats {
    using Cached = C;
    using Query = float;
    using Weight = float;

    static const float* queries(const Rows& p, int64_t row, Memory& memory) {
        if (p.type == FLOAT32) return (const float*)p.queries + row * p.stride;
        const bfloat16* given = (const bfloat16*)p.queries + row * p.stride;
        float* into = at_least(memory.queries, p.heads * p.size);
        for (int64_t i = 0; i < p.heads * p.size; i += WIDTH) put(into + i, load(given + i));
        return into;
    }

    template <int G>
    static constexpr int64_t KEYS = SUMS / G;

    template <int G>
    static void score(const float* queries, const C* key, int64_t stride, int64_t keys, int64_t size, float scale,
                      int64_t pitch, float* scores) {
        constexpr int K = KEYS<G>;
        const C* of[K];
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) of[k] = key + std::min<int64_t>(k, keys - 1) * stride;
        Vector sums[SUMS] = {};
        for (int64_t d = 0; d < size; d += WIDTH) {
#pragma GCC unroll 16
            for (int k = 0; k < K; ++k) {
                const Vector part = load(of[k] + d);
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g) sums[g * K + k] += load(queries + g * size + d) * part;
            }
        }
        const Vector totals = sums_of(sums) * scale;
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)  // scores of missing keys are overwritten later, or not read
            std::memcpy(scores + g * pitch, (const float*)&totals + g * K, K * sizeof(float));
    }

    static const float* weights(const float* scores, int64_t, Memory&) { return scores; }

    template <int G>
    static void weigh(const float* weights, int64_t pitch, const Run<C>& run, const Lines& lines, int64_t size,
                      float* into) {
        int64_t d = 0;
        const auto fetched = [&] { return d == 0 ? lines : Lines(); };
        for (; d + VALUES * WIDTH <= size; d += VALUES * WIDTH)
            add_run<G, VALUES>(weights, pitch, run.from(d), fetched(), size, into + d);
        for (; d < size; d += WIDTH) add_run<G, 1>(weights, pitch, run.from(d), fetched(), size, into + d);
    }

    // Writes a head's output, at element `first` of p.out.
    static void put_all(const Rows& p, const float* sums, int64_t first) {
        for (int64_t i = 0; i < p.size; i += WIDTH)
            if (p.type == FLOAT32)
                put((float*)p.out + first + i, load(sums + i));
            else
                put((bfloat16*)p.out + first + i, load(sums + i));
    }
};

}  // namespace attention
