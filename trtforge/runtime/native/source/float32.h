// Products of float32 rows with a packed tile of 32 outputs, (inputs, 32).
//
// Vectors have the width of the processor's registers, and a block of ROWS rows and WIDE outputs has its accumulators in
// registers.

#pragma once

#include "common.h"

namespace float32 {

constexpr int64_t TILE = 32;  // outputs

#if defined(TRTFORGE_NARROW_VECTORS)  // for tests
constexpr int64_t LANES = 4, VECTORS = 4, ROWS = 6;
#elif defined(__AVX512F__)
constexpr int64_t LANES = 16, VECTORS = 2, ROWS = 12;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, VECTORS = 2, ROWS = 6;
#elif defined(__aarch64__)
constexpr int64_t LANES = 4, VECTORS = 4, ROWS = 6;
#else
constexpr int64_t LANES = 4, VECTORS = 2, ROWS = 6;
#endif
constexpr int64_t WIDE = LANES * VECTORS;  // outputs that are computed at once

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

// Accumulators per output. An addition takes several cycles, so few rows need several to keep the units busy.
template <int M>
constexpr int UNROLL = M == 1 ? 4 : M <= 3 ? 2 : 1;

// sums (M, TILE) += M rows of x times `count` inputs of WIDE outputs of a tile; = if `fresh`.
template <int M>
static void multiply(const float* x, int64_t stride, const float* w, int64_t count, bool fresh, float* sums) {
    constexpr int U = UNROLL<M>;
    Lanes made[U][M][VECTORS];  // in registers: all loops over it are unrolled
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) made[u][m][v] = Lanes();
    int64_t at = 0;
    const auto step = [&](int u) __attribute__((always_inline)) {
        Lanes weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) weights[v] = *(const Lanes*)(w + at * TILE + v * LANES);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) made[u][m][v] += weights[v] * x[m * stride + at];
        ++at;
    };
    while (at + U <= count) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) step(u);
    }
    while (at < count) step(0);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            Lanes* into = (Lanes*)(sums + m * TILE + v * LANES);
            Lanes total = made[0][m][v];
#pragma GCC unroll 4
            for (int u = 1; u < U; ++u) total += made[u][m][v];
            *into = fresh ? total : *into + total;
        }
}

// `multiply` for up to ROWS rows.
static void multiply_rows(int64_t rows, const float* x, int64_t stride, const float* w, int64_t count, bool fresh,
                          float* sums) {
    switch (rows) {
        case 1: return multiply<1>(x, stride, w, count, fresh, sums);
        case 2: return multiply<2>(x, stride, w, count, fresh, sums);
        case 3: return multiply<3>(x, stride, w, count, fresh, sums);
        case 4: return multiply<4>(x, stride, w, count, fresh, sums);
        case 5: return multiply<5>(x, stride, w, count, fresh, sums);
        case 6: return multiply<6>(x, stride, w, count, fresh, sums);
        // The rest is only for AVX512, where ROWS is 12.
        case 7: return multiply<7>(x, stride, w, count, fresh, sums);
        case 8: return multiply<8>(x, stride, w, count, fresh, sums);
        case 9: return multiply<9>(x, stride, w, count, fresh, sums);
        case 10: return multiply<10>(x, stride, w, count, fresh, sums);
        case 11: return multiply<11>(x, stride, w, count, fresh, sums);
        case 12: return multiply<12>(x, stride, w, count, fresh, sums);
    }
}

// Number of rows in the next part, if `rows` are split into nearly equal parts of at most `most`.
static inline int64_t share(int64_t rows, int64_t most) {
    const int64_t count = parts(rows, most);
    return (rows + count - 1) / count;
}

// sums (rows, TILE) += rows of x times `count` inputs of a tile; = if `fresh`.
static inline void multiply_tile(const float* x, int64_t stride, int64_t rows, const float* w, int64_t count, bool fresh,
                                 float* sums) {
    for (int64_t done = 0, part; done < rows; done += part) {
        part = share(rows - done, ROWS);
        for (int64_t wide = 0; wide < TILE; wide += WIDE)
            multiply_rows(part, x + done * stride, stride, w + wide, count, fresh, sums + done * TILE + wide);
    }
}

// totals (rows, TILE) += sums times scales (TILE,); = if `fresh`.
static inline void add_scaled(const float* sums, const float* scales, int64_t rows, bool fresh, float* totals) {
    constexpr int64_t COUNT = TILE / LANES;
    Lanes factors[COUNT];
#pragma GCC unroll 8
    for (int64_t v = 0; v < COUNT; ++v) factors[v] = ((const Lanes*)scales)[v];
    for (int64_t row = 0; row < rows; ++row)
#pragma GCC unroll 8
        for (int64_t v = 0; v < COUNT; ++v) {
            Lanes* total = (Lanes*)(totals + row * TILE) + v;
            const Lanes before = fresh ? Lanes() : *total;
            *total = ((const Lanes*)(sums + row * TILE))[v] * factors[v] + before;
        }
}

}  // namespace float32
