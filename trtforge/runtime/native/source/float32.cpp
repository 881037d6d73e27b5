// Linear layers in float32.
//
// Weights are packed in tiles of 32 outputs, (outputs / 32 rounded up, inputs, 32); the last tile is padded.

#include "float32.h"
#include "linears.h"
#include "team.h"

using float32::TILE;

constexpr int64_t PANEL = 96;    // maximum rows of a panel
constexpr int64_t DEPTH = 1024;  // inputs of a tile that stay in the L2 cache for all rows of a panel

// sums (rows, TILE) = up to PANEL rows of x times one tile.
static void panel(const FloatLinear& l, const float* x, int64_t rows, const float* w, float* sums) {
    for (int64_t first = 0; first < l.inputs; first += DEPTH) {
        const int64_t count = std::min(DEPTH, l.inputs - first);
        float32::multiply_tile(x + first, l.inputs, rows, w + first * TILE, count, first == 0, sums);
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
    const int64_t height = float32::share(l.rows, PANEL), panels = (l.rows + height - 1) / height;
    const int64_t tiles = (l.outputs + TILE - 1) / TILE;
    team::for_each(tiles * panels, l.rows * l.inputs * l.outputs >= 1 << 17, [&](int64_t part) {
        alignas(64) float sums[PANEL * TILE];
        const int64_t first = part / panels * TILE, top = part % panels * height;
        const int64_t rows = std::min(height, l.rows - top);
        panel(l, l.x + top * l.inputs, rows, l.weight + first * l.inputs, sums);
        put_panel(l, sums, rows, first, l.y + top * l.outputs);
    });
}
