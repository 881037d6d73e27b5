// Products of many rows by Intel's Advanced Matrix Extensions; without them, or with TRTFORGE_WITHOUT_AMX, `suits` is
// false.
//
// A tile register holds 16 rows of 64 bytes. TDPBF16PS: C (16 x 16 float32) += A (16 rows x 32 inputs) times B (16
// pairs of inputs x 16 outputs x 2). TDPBUSD: C (16 x 16 int32) += A (16 rows x 64 unsigned bytes) times B (16 quads of
// inputs x 16 outputs x 4 signed bytes). Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume
// 1, chapter 18. TRTFORGE_EMULATE_AMX computes the same in plain loops, to test this code on other processors.

#pragma once

#include "common.h"

#if (defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(TRTFORGE_WITHOUT_AMX)) || defined(TRTFORGE_EMULATE_AMX)

#if defined(TRTFORGE_EMULATE_AMX)
#include "amx_emulation.h"
#else
#include "amx_registers.h"
#endif

namespace amx {

constexpr int64_t HEIGHT = 16;  // rows of a tile register
constexpr int64_t FEWEST = 5;   // rows from which a tile is faster than vectors

// Inputs of type T that one instruction adds up.
template <typename T>
constexpr int64_t DEPTH = 64 / int64_t(sizeof(T));

template <typename T = bfloat16>
static inline bool suits(int64_t rows, int64_t inputs) {
    return rows >= FEWEST && inputs % DEPTH<T> == 0 && tile::granted();
}

// Rows of a tile register for a panel of `rows`.
static inline int64_t height(int64_t rows) { return std::min(HEIGHT, rows); }

// Configures a thread's tile registers while it lives: 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
class Session {
  public:
    Session(int64_t rows, bool wanted) : used(wanted) {
        if (!used) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; ++tile) {
            config.bytes[tile] = 64;
            config.rows[tile] = uint8_t(tile < 6 ? height(rows) : HEIGHT);
        }
        tile::configure(&config);
    }
    ~Session() {
        if (used) tile::release();
    }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

  private:
    const bool used;
};

// The sums of one or two registers of rows: `second` is null or where the second one's go. X: bfloat16, or uint8_t with
// weights of int8_t and sums of int32_t.
template <typename X, typename W, typename S>
static inline void products(const X* low, const X* high, int64_t stride, const W* w, int64_t inputs, S* first,
                            S* second) {
    const int bytes = int(stride * int64_t(sizeof(X))), pitch = 128;
    tile::stores_are_done();
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t at = 0; at < inputs; at += DEPTH<X>) {
        const char* weights = (const char*)(w + at * 32);
        TILE_LOAD(6, weights, pitch);
        TILE_LOAD(7, weights + 64, pitch);
        TILE_LOAD(4, low + at, bytes);
        TILE_MULTIPLY(X, 0, 4, 6);
        TILE_MULTIPLY(X, 1, 4, 7);
        if (!second) continue;
        TILE_LOAD(5, high + at, bytes);
        TILE_MULTIPLY(X, 2, 5, 6);
        TILE_MULTIPLY(X, 3, 5, 7);
    }
    TILE_STORE(0, first, pitch);
    TILE_STORE(1, first + 16, pitch);
    if (!second) return;
    TILE_STORE(2, second, pitch);
    TILE_STORE(3, second + 16, pitch);
}

// sums (rows, 32) = x times one tile of weights. The last register of rows may begin before the rows that are left, so
// that none is read beyond the end; what is computed twice is the same.
template <typename X, typename W, typename S>
static inline void panel(const X* x, int64_t stride, int64_t rows, const W* w, int64_t inputs, S* sums) {
    const int64_t last = rows - height(rows);
    for (int64_t first = 0; first < rows; first += 2 * HEIGHT) {
        const int64_t low = std::min(first, last), high = std::min(first + HEIGHT, last);
        const bool two = rows - first > HEIGHT;
        products(x + low * stride, x + high * stride, stride, w, inputs, sums + low * 32,
                 two ? sums + high * 32 : nullptr);
    }
}

}  // namespace amx

#else

namespace amx {

template <typename T = bfloat16>
static inline bool suits(int64_t, int64_t) {
    return false;
}
template <typename X, typename W, typename S>
static inline void panel(const X*, int64_t, int64_t, const W*, int64_t, S*) {}
struct Session {
    Session(int64_t, bool) {}
};

}  // namespace amx

#endif
