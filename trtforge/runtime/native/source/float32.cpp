// Linear layers in float32.
//
// Weights are packed in tiles of 32 outputs, (outputs / 32, inputs, 32); the last tile is filled up. Vectors are those of
// the processor, so that a block of rows and outputs has its sums in registers.

#include "linears.h"
#include "team.h"

constexpr int64_t TILE = 32;     // outputs
constexpr int64_t PANEL = 96;    // most rows whose sums are kept together
constexpr int64_t DEPTH = 1024;  // inputs of a tile that stay in the second-level cache for all rows of a panel

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

// A sum takes several cycles: few rows need several sums for each output to keep the units busy.
template <int M>
constexpr int UNROLL = M == 1 ? 4 : M <= 3 ? 2 : 1;

// sums (M, TILE) = or, unless `fresh`, += M rows of x times `count` inputs of WIDE outputs of a tile.
template <int M>
static void multiply(const float* x, int64_t stride, const float* w, int64_t count, bool fresh, float* sums) {
    constexpr int U = UNROLL<M>;
    Lanes made[U][M][VECTORS] = {};
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
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < VECTORS; ++v) {
            Lanes* into = (Lanes*)(sums + m * TILE + v * LANES);
            Lanes total = made[0][m][v];
            for (int u = 1; u < U; ++u) total += made[u][m][v];
            *into = fresh ? total : *into + total;
        }
}

// `multiply` for a number of rows up to ROWS.
static void multiply_rows(int64_t rows, const float* x, int64_t stride, const float* w, int64_t count, bool fresh,
                          float* sums) {
    switch (rows) {
        case 1: return multiply<1>(x, stride, w, count, fresh, sums);
        case 2: return multiply<2>(x, stride, w, count, fresh, sums);
        case 3: return multiply<3>(x, stride, w, count, fresh, sums);
        case 4: return multiply<4>(x, stride, w, count, fresh, sums);
        case 5: return multiply<5>(x, stride, w, count, fresh, sums);
        case 6: return multiply<6>(x, stride, w, count, fresh, sums);
        // With fewer registers there are no more rows.
        case 7: return multiply<7>(x, stride, w, count, fresh, sums);
        case 8: return multiply<8>(x, stride, w, count, fresh, sums);
        case 9: return multiply<9>(x, stride, w, count, fresh, sums);
        case 10: return multiply<10>(x, stride, w, count, fresh, sums);
        case 11: return multiply<11>(x, stride, w, count, fresh, sums);
        case 12: return multiply<12>(x, stride, w, count, fresh, sums);
    }
}

// Where the last part is shorter, rows are shared nearly equally.
static inline int64_t share(int64_t rows, int64_t most) {
    const int64_t parts = (rows + most - 1) / most;
    return (rows + parts - 1) / parts;
}

// sums (rows, TILE) = up to PANEL rows times one tile.
static void panel(const FloatLinear& l, const float* x, int64_t rows, const float* w, float* sums) {
    for (int64_t first = 0; first < l.inputs; first += DEPTH) {
        const int64_t count = std::min(DEPTH, l.inputs - first);
        for (int64_t done = 0, part; done < rows; done += part) {
            part = share(rows - done, ROWS);
            for (int64_t wide = 0; wide < TILE; wide += WIDE)
                multiply_rows(part, x + done * l.inputs + first, l.inputs, w + first * TILE + wide, count, first == 0,
                              sums + done * TILE + wide);
        }
    }
}

static void put_panel(const FloatLinear& l, const float* sums, int64_t rows, int64_t first, float* y) {
    const int64_t count = std::min(TILE, l.outputs - first);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i)
            y[row * l.outputs + first + i] = sums[row * TILE + i] + (l.bias ? l.bias[first + i] : 0.0f);
}

EXPORT void linear_float32(const FloatLinear* given) {
    const FloatLinear& l = *given;
    if (l.rows == 0) return;
    const int64_t height = share(l.rows, PANEL), panels = (l.rows + height - 1) / height;
    const int64_t tiles = (l.outputs + TILE - 1) / TILE;
    team::for_each(tiles * panels, l.rows * l.inputs * l.outputs >= 1 << 17, [&](int64_t part) {
        alignas(64) float sums[PANEL * TILE];
        const int64_t first = part / panels * TILE, top = part % panels * height;
        const int64_t rows = std::min(height, l.rows - top);
        panel(l, l.x + top * l.inputs, rows, l.weight + first * l.inputs, sums);
        put_panel(l, sums, rows, first, l.y + top * l.outputs);
    });
}
