// Products of bfloat16 rows with packed tiles of 32 outputs, sums in float32.
//
// A tile is (inputs / 2, 32, 2), so that one vector holds two inputs of 16 outputs, which VDPBF16PS (AVX512-BF16) and
// TDPBF16PS (AMX) multiply with two activations.

#pragma once

#include "common.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_PRODUCTS 1

#include "amx.h"

#include <immintrin.h>

constexpr int64_t TILE = 32;        // outputs
constexpr int64_t ROWS = 12;        // of activations that fit the registers with a tile's sums
constexpr int64_t PANEL = 64;       // most rows whose sums stay in the first-level cache

using Sums = __m512[2];  // of one row: 32 outputs

static inline __m512bh pairs(const void* from) { return (__m512bh)_mm512_loadu_si512(from); }

// Two activations in every lane.
static inline __m512bh both(const bfloat16* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
}

// VDPBF16PS takes several cycles: few rows need several sums for each output to keep the units busy.
template <int M>
constexpr int UNROLL = M == 1 ? 4 : M <= 3 ? 2 : 1;

template <int M, int U>
static inline void add_up(const __m512 (&sums)[U][M][2], Sums* out) {
    for (int m = 0; m < M; ++m)
        for (int half = 0; half < 2; ++half) {
            out[m][half] = sums[0][m][half];
            for (int u = 1; u < U; ++u) out[m][half] = _mm512_add_ps(out[m][half], sums[u][m][half]);
        }
}

// Fetches from memory the tile behind the one that is multiplied, as rows are in `count` parts, one part at a time: each
// step, which multiplies `width` bytes of weights, fetches as many divided by the number of parts.
struct Ahead {
    const char* from;
    int64_t pitch;

    Ahead(const void* w, int64_t steps, int64_t width, int64_t part, int64_t count)
        : from((const char*)w + steps * width), pitch((width + count - 1) / count) {
        from += part * steps * pitch;
    }
    void step(int64_t at) const {
        _mm_prefetch(from + at * pitch, _MM_HINT_T1);
        if (pitch > 64) _mm_prefetch(from + at * pitch + 64, _MM_HINT_T1);
    }
};

// out[m] = x[m] times one tile, over 2 x `count` inputs.
template <int M>
static inline __attribute__((always_inline)) void multiply(const bfloat16* x, int64_t stride, const bfloat16* w,
                                                           int64_t count, const Ahead& ahead, Sums* out) {
    constexpr int U = UNROLL<M>;
    __m512 sums[U][M][2] = {};
    int64_t at = 0;
    const auto step = [&](int u) __attribute__((always_inline)) {
        ahead.step(at);
        const __m512bh low = pairs(w + at * 64), high = pairs(w + at * 64 + 32);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const __m512bh a = both(x + m * stride + 2 * at);
            sums[u][m][0] = _mm512_dpbf16_ps(sums[u][m][0], low, a);
            sums[u][m][1] = _mm512_dpbf16_ps(sums[u][m][1], high, a);
        }
        ++at;
    };
    while (at + U <= count) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) step(u);
    }
    while (at < count) step(0);
    add_up<M, U>(sums, out);
}

// Calls function<count>(...), with a count of 1 to ROWS as a compile-time constant.
#define FOR_ROWS(count, function, ...)                    \
    switch (count) {                                      \
        case 1: function<1>(__VA_ARGS__); break;          \
        case 2: function<2>(__VA_ARGS__); break;          \
        case 3: function<3>(__VA_ARGS__); break;          \
        case 4: function<4>(__VA_ARGS__); break;          \
        case 5: function<5>(__VA_ARGS__); break;          \
        case 6: function<6>(__VA_ARGS__); break;          \
        case 7: function<7>(__VA_ARGS__); break;          \
        case 8: function<8>(__VA_ARGS__); break;          \
        case 9: function<9>(__VA_ARGS__); break;          \
        case 10: function<10>(__VA_ARGS__); break;        \
        case 11: function<11>(__VA_ARGS__); break;        \
        default: function<12>(__VA_ARGS__); break;        \
    }

template <int M>
static inline void store_sums(const Sums* from, float* sums) {
    for (int m = 0; m < M; ++m) {
        _mm512_store_ps(sums + m * TILE, from[m][0]);
        _mm512_store_ps(sums + m * TILE + 16, from[m][1]);
    }
}

template <int M>
static void sums_of(const bfloat16* x, int64_t stride, const bfloat16* w, int64_t inputs, const Ahead& ahead,
                    float* sums) {
    Sums out[M];
    multiply<M>(x, stride, w, inputs / 2, ahead, out);
    store_sums<M>(out, sums);
}

// Rows of the next part where `rows` are split into `parts` nearly equal ones.
static inline int64_t share(int64_t rows, int64_t parts) { return (rows + parts - 1) / parts; }

static inline int64_t panels(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

static inline int64_t parts(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

// sums (rows, 32) = x times one bfloat16 tile, up to PANEL rows.
static void panel(const bfloat16* x, int64_t stride, int64_t rows, const bfloat16* w, int64_t inputs, float* sums) {
    if (amx::suits(rows, inputs)) return amx::panel(x, stride, rows, w, inputs, sums);
    for (int64_t done = 0, left = parts(rows), count; left > 0; --left, done += count) {
        count = share(rows - done, left);
        const Ahead ahead(w, inputs / 2, 128, parts(rows) - left, parts(rows));
        FOR_ROWS(count, sums_of, x + done * stride, stride, w, inputs, ahead, sums + done * TILE);
    }
}

#endif
