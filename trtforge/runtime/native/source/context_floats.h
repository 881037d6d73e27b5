// Context attention by products of float32, on any processor.

#pragma once

#include "context.h"
#include "float32.h"

namespace context {

static_assert(float32::TILE == COLUMNS, "a tile of keys is one of outputs");

// Queries and results are numbers of type T. The members are those of `Pairs`.
template <typename T>
struct Floats {
    using Number = T;
    using Packed = float;
    using Input = float;
    struct Session {};

    static Session session(int64_t, int64_t) { return {}; }

    static void multiply(const float* x, int64_t stride, int64_t rows, const float* tile, int64_t depth, float* sums) {
        float32::multiply_tile(x, stride, rows, tile, depth, true, sums);
    }

    // Keys become two tiles (size, 32), values size / 32 tiles (KEYS, 32).
    template <typename C>
    static void pack(const Slots& slots, int64_t size, float*, float* into) {
        std::fill(into, into + 2 * KEYS * size, 0.0f);
        for (int64_t key = 0; key < slots.count; ++key) {
            const C *keys = (const C*)slots.keys[key], *values = (const C*)(slots.keys[key] + slots.values);
            float* column = into + key / COLUMNS * COLUMNS * size + key % COLUMNS;
            float* row = into + KEYS * size + key * COLUMNS;
            for (int64_t d = 0; d < size; d += WIDTH) {
                const Vector numbers = load(keys + d);
                for (int64_t i = 0; i < WIDTH; ++i) column[(d + i) * COLUMNS] = numbers[i];
                put(row + d / COLUMNS * COLUMNS * KEYS + d % COLUMNS, load(values + d));
            }
        }
    }
};

}  // namespace context
