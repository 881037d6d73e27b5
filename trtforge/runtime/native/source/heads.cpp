// Per-head matrix products, and copies of parts of heads, for multi-head latent attention.

#include "float32.h"
#include "team.h"
#include "vectors.h"

using float32::TILE;

// y (rows, heads, outputs) = x (rows, heads, inputs) W, with one matrix per head, weight (heads, inputs, outputs). `..._row`
// and `..._head`: row and head strides of x and y.
struct HeadProducts {
    const void* x;
    const void* weight;
    void* y;
    int64_t rows, heads, inputs, outputs, x_row, x_head, y_row, y_head;
};

constexpr int64_t CHUNK = 128;  // inputs whose weights are in the cache as float32
constexpr int64_t BLOCK = 96;   // maximum rows in a block
constexpr int64_t AHEAD = 16;   // prefetch distance in inputs, whose weights are far apart in memory

// Converts `width` columns of a matrix to a float32 tile (inputs, TILE), padded with zeros.
template <typename T>
static void widen_tile(const T* from, int64_t pitch, int64_t inputs, int64_t width, float* into) {
    for (int64_t i = 0; i < inputs; ++i, from += pitch, into += TILE) {
        __builtin_prefetch(from + AHEAD * pitch);
        if (width == TILE) {
            for (int64_t o = 0; o < TILE; o += WIDTH) put(into + o, load(from + o));
        } else {
            for (int64_t o = 0; o < TILE; ++o) into[o] = o < width ? to_float(from[o]) : 0.0f;
        }
    }
}

// Converts rows to float32 (rows, inputs), with row stride CHUNK.
template <typename T>
static void widen_rows(const T* from, int64_t stride, int64_t rows, int64_t inputs, float* into) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < inputs; ++i) into[row * CHUNK + i] = to_float(from[row * stride + i]);
}

// Computes a tile of a head's outputs, for at most BLOCK rows.
template <typename T>
static void multiply_part(const HeadProducts& p, const T* x, const T* weight, int64_t rows, int64_t width, T* y) {
    alignas(64) float tile[CHUNK * TILE], inputs[BLOCK * CHUNK], sums[BLOCK * TILE];
    for (int64_t first = 0; first < p.inputs; first += CHUNK) {
        const int64_t count = std::min(CHUNK, p.inputs - first);
        widen_tile(weight + first * p.outputs, p.outputs, count, width, tile);
        widen_rows(x + first, p.x_row, rows, count, inputs);
        float32::multiply_tile(inputs, CHUNK, rows, tile, count, first == 0, sums);
    }
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t o = 0; o < width; ++o) put(y + row * p.y_row + o, sums[row * TILE + o]);
}

template <typename T>
static void multiply_heads(const HeadProducts& p) {
    const int64_t tiles = (p.outputs + TILE - 1) / TILE, height = float32::share(p.rows, BLOCK);
    team::for_each(p.heads * tiles, p.rows * p.heads * p.inputs * p.outputs >= 1 << 17, [&](int64_t part) {
        const int64_t head = part / tiles, o = part % tiles * TILE;
        const T* weight = (const T*)p.weight + head * p.inputs * p.outputs + o;
        for (int64_t top = 0; top < p.rows; top += height) {
            const int64_t rows = std::min(height, p.rows - top);
            const T* x = (const T*)p.x + top * p.x_row + head * p.x_head;
            T* y = (T*)p.y + top * p.y_row + head * p.y_head + o;
            multiply_part<T>(p, x, weight, rows, std::min(TILE, p.outputs - o), y);
        }
    });
}

EXPORT void project_heads(int64_t type, const HeadProducts* p) {
    if (p->rows == 0) return;
    type == FLOAT32 ? multiply_heads<float>(*p) : multiply_heads<bfloat16>(*p);
}

// into (rows, heads, bytes) = from, with row and head strides in bytes.
EXPORT void copy_heads(const char* from, char* into, int64_t rows, int64_t heads, int64_t bytes, int64_t from_row,
                       int64_t from_head, int64_t into_row, int64_t into_head) {
    team::for_each(rows, rows * heads * bytes >= 4 * PARALLEL_FROM, [=](int64_t row) {
        for (int64_t head = 0; head < heads; ++head)
            std::memcpy(into + row * into_row + head * into_head, from + row * from_row + head * from_head,
                        size_t(bytes));
    });
}
