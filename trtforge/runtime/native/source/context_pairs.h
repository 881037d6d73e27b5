// Context attention with bfloat16 products.

#pragma once

#include "context.h"
#include "products.h"

#if defined(HAS_PRODUCTS)

namespace context {

// A cached vector as bfloat16: in place if it is stored as bfloat16, else converted in `into`.
static inline const bfloat16* expand(const bfloat16* from, int64_t, bfloat16*) { return from; }

template <typename C>
static inline const bfloat16* expand(const C* from, int64_t size, bfloat16* into) {
    for (int64_t i = 0; i < size; i += WIDTH) put(into + i, load(from + i));
    return into;
}

// Packs KEYS keys to two tiles (size / 2, 32, 2).
static void pack_keys(const bfloat16* const* keys, int64_t size, bfloat16* into) {
    for (int64_t key = 0; key < KEYS; key += 16)
        for (int64_t column = 0; column < size; column += 32) {
            Vector rows[16];  // of pairs
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) rows[i] = *(const Vector*)(keys[key + i] + column);
            transpose(rows);
            bfloat16* first = into + key / TILE * TILE * size + column * TILE + key % TILE * 2;
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) *(Vector*)(first + i * 2 * TILE) = rows[i];
        }
}

// Packs KEYS values to size / 32 tiles (KEYS / 2, 32, 2).
static void pack_values(const bfloat16* const* values, int64_t size, bfloat16* into) {
    const __m512i front = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                           5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    for (int64_t column = 0; column < size; column += TILE)
        for (int64_t key = 0; key < KEYS; key += 2) {
            const __m512i even = _mm512_loadu_si512(values[key] + column);
            const __m512i odd = _mm512_loadu_si512(values[key + 1] + column);
            bfloat16* pairs = into + column * KEYS + key * TILE;
            _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(even, front, odd));
            _mm512_storeu_si512(pairs + TILE, _mm512_permutex2var_epi16(even, back, odd));
        }
}

// Uses the products of `Way` (products.h).
template <class Way>
struct Pairs {
    using Number = bfloat16;               // of queries and results
    using Packed = bfloat16;               // of keys and values
    using Input = typename Way::Input;     // of queries and probabilities in the products
    using Session = amx::Session;

    static Session session(int64_t rows, int64_t size) { return Session(rows, Way::uses_tiles(size)); }

    // sums (rows, COLUMNS) = x (rows, depth) times a tile of `depth` inputs.
    static void multiply(const Input* x, int64_t stride, int64_t rows, const Packed* tile, int64_t depth, float* sums) {
        panel<Way>(x, stride, rows, tile, depth, sums);
    }

    // Packs the keys and then the values of one head in one block; those beyond the sequence are zero. `next`: the block to
    // pack next, which is prefetched; `memory`: scratch (KEYS, size).
    template <typename C>
    static void pack(const Slots& slots, const Slots& next, int64_t size, Packed* memory, Packed* into) {
        alignas(64) static const bfloat16 zeros[MOST_SIZE] = {};
        const bfloat16* rows[KEYS];
        const auto collect = [&](int64_t behind) {
            next.fetch(behind);
            for (int64_t i = 0; i < KEYS; ++i)
                rows[i] = i < slots.count ? expand((const C*)(slots.keys[i] + behind), size, memory + i * size) : zeros;
        };
        collect(0);
        pack_keys(rows, size, into);
        collect(slots.values);
        pack_values(rows, size, into + KEYS * size);
    }
};

}  // namespace context

#endif
