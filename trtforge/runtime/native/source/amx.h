// Matrix products with Intel AMX (Advanced Matrix Extensions). Without AMX, or with TRTFORGE_WITHOUT_AMX, `suits` is false.
//
// A tile register holds 16 rows of 64 bytes. TDPBF16PS: C (16 x 16 float32) += A (16 rows x 32 inputs) times B (16
// pairs of inputs x 16 outputs x 2). TDPBUSD: C (16 x 16 int32) += A (16 rows x 64 unsigned bytes) times B (16 quads of
// inputs x 16 outputs x 4 signed bytes). TDPBSUD: the same with signed bytes in A and unsigned bytes in B. Source: Intel 64
// and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18. TRTFORGE_EMULATE_AMX computes the same in
// plain loops, to test this code on other processors.

#pragma once

#include "common.h"

#if (defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(TRTFORGE_WITHOUT_AMX)) || defined(TRTFORGE_EMULATE_AMX)

#if defined(TRTFORGE_EMULATE_AMX)
#include "amx_emulation.h"
#else
#include "amx_registers.h"
#endif

#include <immintrin.h>

#define HAS_AMX 1

namespace amx {

constexpr int64_t HEIGHT = 16;  // rows of a tile register

// Inputs of type T in one instruction's dot products.
template <typename T>
constexpr int64_t DEPTH = 64 / int64_t(sizeof(T));

// Whether AMX can multiply this number of inputs. Vector instructions are not faster even for a single row.
template <typename T = bfloat16>
static inline bool suits(int64_t inputs) {
    return inputs % DEPTH<T> == 0 && tile::granted();
}

// Rows of a tile register for a panel of `rows` rows.
static inline int64_t height(int64_t rows) { return std::min(HEIGHT, rows); }

// Configures a thread's tile registers during its lifetime: 0 to 3 are accumulators, 4 and 5 hold activations, 6 and 7
// weights.
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

constexpr int64_t STEP = 2048;  // bytes of the weights of DEPTH inputs and 32 outputs

// Work to interleave with a product: step(index) is called after each DEPTH inputs. `Nothing` does no work.

struct Nothing {
    void step(int64_t) const {}
};

// Prefetches weights to the L2 cache: the first `width` bytes of each STEP.
struct Fetch {
    const char* from;
    int64_t width;

    void step(int64_t index) const {
        for (int64_t at = 0; at < width; at += 64) _mm_prefetch(from + index * STEP + at, _MM_HINT_T1);
    }
};

// first (HEIGHT, 32) += the rows at `low` times `inputs` inputs of a tile of weights and, if TWO, second += the rows at
// `high` times them; with `fresh`, = instead of +=. X: bfloat16 with float sums; uint8_t with int8_t weights or int8_t with
// uint8_t weights, with int32_t sums.
template <bool TWO, typename X, typename W, typename S, class Beside>
static inline void products(const X* low, const X* high, int64_t pitch, int64_t step, const W* w, int64_t inputs,
                            bool fresh, S* first, S* second, const Beside& beside) {
    const int64_t bytes = pitch * int64_t(sizeof(X)), width = 128;
    tile::stores_are_done();
    if (fresh) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (TWO) TILE_ZERO(2);
        if (TWO) TILE_ZERO(3);
    } else {
        TILE_LOAD(0, first, width);
        TILE_LOAD(1, first + 16, width);
        if (TWO) TILE_LOAD(2, second, width);
        if (TWO) TILE_LOAD(3, second + 16, width);
    }
    for (int64_t at = 0; at < inputs / DEPTH<X>; ++at) {
        const char* weights = (const char*)w + at * STEP;
        TILE_LOAD(4, low + at * step, bytes);
        TILE_LOAD(6, weights, width);
        TILE_MULTIPLY(X, 0, 4, 6);
        TILE_LOAD(7, weights + 64, width);
        TILE_MULTIPLY(X, 1, 4, 7);
        if (TWO) {
            TILE_LOAD(5, high + at * step, bytes);
            TILE_MULTIPLY(X, 2, 5, 6);
            TILE_MULTIPLY(X, 3, 5, 7);
        }
        beside.step(at);
    }
    TILE_STORE(0, first, width);
    TILE_STORE(1, first + 16, width);
    if (TWO) TILE_STORE(2, second, width);
    if (TWO) TILE_STORE(3, second + 16, width);
}

// sums (rows, 32) = x times a tile of weights. To read no rows beyond the end, the last register may overlap the one before
// it; rows that are computed twice give the same results.
template <typename X, typename W, typename S>
static inline void panel(const X* x, int64_t stride, int64_t rows, const W* w, int64_t inputs, S* sums) {
    const int64_t last = rows - height(rows);
    for (int64_t first = 0; first < rows; first += 2 * HEIGHT) {
        const int64_t low = std::min(first, last), high = std::min(first + HEIGHT, last);
        if (rows - first > HEIGHT)
            products<true>(x + low * stride, x + high * stride, stride, DEPTH<X>, w, inputs, true, sums + low * 32,
                           sums + high * 32, Nothing());
        else
            products<false>(x + low * stride, (const X*)nullptr, stride, DEPTH<X>, w, inputs, true, sums + low * 32,
                            (S*)nullptr, Nothing());
    }
}

}  // namespace amx

#else

namespace amx {

template <typename T = bfloat16>
static inline bool suits(int64_t) {
    return false;
}
template <typename X, typename W, typename S>
static inline void panel(const X*, int64_t, int64_t, const W*, int64_t, S*) {}
struct Session {
    Session(int64_t, bool) {}
};

}  // namespace amx

#endif
