// Emulates AMX tile registers in plain loops, to test `amx.h` and `amx_blocks.h` on processors without AMX.

#pragma once

#include "common.h"

namespace tile {

static inline bool granted() { return true; }

struct Registers {
    uint8_t rows[8];
    uint8_t data[8][16][64];
};

static thread_local Registers tiles;

static inline void configure(const void* config) {
    std::memset(&tiles, 0, sizeof tiles);
    std::memcpy(tiles.rows, (const uint8_t*)config + 48, sizeof tiles.rows);
}

static inline void stores_are_done() {}

static inline void release() {}

static inline void zero(int tile) { std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]); }

static inline void load(int tile, const void* from, int64_t stride) {
    for (int row = 0; row < tiles.rows[tile]; ++row)
        std::memcpy(tiles.data[tile][row], (const uint8_t*)from + row * stride, 64);
}

static inline void store(int tile, void* into, int64_t stride) {
    for (int row = 0; row < tiles.rows[tile]; ++row)
        std::memcpy((uint8_t*)into + row * stride, tiles.data[tile][row], 64);
}

// C += A times B, for bytes of types A and B.
template <typename A, typename B>
static inline void multiply_bytes(int c, int a, int b) {
    for (int row = 0; row < tiles.rows[c]; ++row) {
        int32_t sums[16];
        A left[64];
        B right[16][64];
        std::memcpy(sums, tiles.data[c][row], 64);
        std::memcpy(left, tiles.data[a][row], 64);
        std::memcpy(right, tiles.data[b], sizeof right);
        for (int in = 0; in < 64; ++in)
            for (int out = 0; out < 16; ++out)
                sums[out] += int32_t(left[in]) * right[in / 4][4 * out + in % 4];
        std::memcpy(tiles.data[c][row], sums, 64);
    }
}

template <typename X>
static inline void multiply(int c, int a, int b) {
    if constexpr (std::is_same_v<X, int8_t>) return multiply_bytes<int8_t, uint8_t>(c, a, b);
    if constexpr (std::is_same_v<X, uint8_t>) return multiply_bytes<uint8_t, int8_t>(c, a, b);
    for (int row = 0; row < tiles.rows[c]; ++row) {
        float sums[16];
        bfloat16 left[32], right[16][32];
        std::memcpy(sums, tiles.data[c][row], 64);
        std::memcpy(left, tiles.data[a][row], 64);
        std::memcpy(right, tiles.data[b], sizeof right);
        for (int pair = 0; pair < 16; ++pair)
            for (int out = 0; out < 16; ++out)
                for (int part = 0; part < 2; ++part)
                    sums[out] += to_float(left[2 * pair + part]) * to_float(right[pair][2 * out + part]);
        std::memcpy(tiles.data[c][row], sums, 64);
    }
}

}  // namespace tile

#define TILE_ZERO(number) tile::zero(number)
#define TILE_LOAD(number, from, stride) tile::load(number, from, stride)
#define TILE_STORE(number, into, stride) tile::store(number, into, stride)
#define TILE_MULTIPLY(X, c, a, b) tile::multiply<X>(c, a, b)
