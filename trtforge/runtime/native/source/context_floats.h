// Context attention with float32 products, for any processor.

#pragma once

#include "context.h"
#include "float32.h"

namespace context {

static_assert(float32::TILE == COLUMNS, "a tile of keys is one of outputs");

// For queries and results of type T. The members are those of `Pairs`.
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

    // Packs keys to two tiles (size, 32), and values to size / 32 tiles (KEYS, 32); those beyond the sequence are zero.
    template <typename C>
    static void pack(const Slots& slots, const Slots& next, int64_t size, float*, float* into) {
        const auto read = [&](int64_t key, int64_t behind, int64_t d) {
            return key < slots.count ? load((const C*)(slots.keys[key] + behind) + d) : Vector();
        };
        next.fetch(0);
        for (int64_t key = 0; key < KEYS; key += WIDTH) {
            float* columns = into + key / COLUMNS * COLUMNS * size + key % COLUMNS;
            for (int64_t d = 0; d < size; d += WIDTH) {
                Vector rows[WIDTH];
#pragma GCC unroll 16
                for (int64_t i = 0; i < WIDTH; ++i) rows[i] = read(key + i, 0, d);
                transpose(rows);
#pragma GCC unroll 16
                for (int64_t i = 0; i < WIDTH; ++i) put(columns + (d + i) * COLUMNS, rows[i]);
            }
        }
        next.fetch(slots.values);
        float* values = into + KEYS * size;
        for (int64_t key = 0; key < KEYS; ++key)
            for (int64_t d = 0; d < size; d += WIDTH)
                put(values + d / COLUMNS * COLUMNS * KEYS + key * COLUMNS + d % COLUMNS, read(key, slots.values, d));
    }
};

}  // namespace context
