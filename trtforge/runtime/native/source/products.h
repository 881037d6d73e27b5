// Products of bfloat16 rows with packed tiles of 32 outputs, accumulated in float32.
//
// A tile is (inputs / 2, 32, 2): one vector holds two inputs of 16 outputs, which VDPBF16PS (AVX512-BF16) and TDPBF16PS (AMX)
// multiply by two activations. For float32 fused multiply-adds, a vector is split into its even and odd elements.

#pragma once

#include "common.h"

#if defined(__AVX512BW__)
#define HAS_PRODUCTS 1

#include "amx.h"

#include <immintrin.h>
#include <type_traits>

constexpr int64_t TILE = 32;        // outputs
constexpr int64_t ROWS = 8;         // rows that are multiplied together: the addresses of more would not fit in registers
constexpr int64_t PANEL = 64;       // maximum rows whose accumulators stay in the L1 cache

using Sums = __m512[2];  // one row's accumulators of 32 outputs

// Two ways to multiply follow: `Dots` and `MultiplyAdds`. `add` adds to 16 accumulators, one per output, the dot products of
// two weights and two activations.

#if defined(__AVX512BF16__)

// Broadcasts two activations to every lane.
static inline __m512bh both(const bfloat16* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
}

// Multiplies with VDPBF16PS, one instruction for both weights; `panel` uses AMX if available.
struct Dots {
    using Input = bfloat16;
    struct Weights {
        __m512bh two;
        Weights() = default;
        explicit Weights(__m512i from) : two((__m512bh)from) {}
    };
    struct Inputs {
        __m512bh two;
        explicit Inputs(const bfloat16* x) : two(both(x)) {}
    };
    static __m512 add(__m512 sum, const Weights& w, const Inputs& x) { return _mm512_dpbf16_ps(sum, w.two, x.two); }
    static __m512 add(__m512 sum, const Weights& a, const Weights& b) { return _mm512_dpbf16_ps(sum, a.two, b.two); }
    static bool uses_tiles(int64_t inputs) { return amx::suits(inputs); }
};

#endif

// Multiplies with float32 fused multiply-adds, one for each weight.
struct MultiplyAdds {
    using Input = float;
    struct Weights {
        __m512 even, odd;
        Weights() = default;
        explicit Weights(__m512i from)
            : even((__m512)_mm512_slli_epi32(from, 16)),
              odd((__m512)_mm512_and_si512(from, _mm512_set1_epi32(int32_t(0xffff0000)))) {}
    };
    struct Inputs {
        __m512 even, odd;
        explicit Inputs(const float* x) : even(_mm512_set1_ps(x[0])), odd(_mm512_set1_ps(x[1])) {}
    };
    static __m512 add(__m512 sum, const Weights& w, const Inputs& x) {
        return _mm512_fmadd_ps(w.odd, x.odd, _mm512_fmadd_ps(w.even, x.even, sum));
    }
    static __m512 add(__m512 sum, const Weights& a, const Weights& b) {
        return _mm512_fmadd_ps(a.odd, b.odd, _mm512_fmadd_ps(a.even, b.even, sum));
    }
    static bool uses_tiles(int64_t) { return false; }
};

// Whether `MultiplyAdds` is faster on this processor than `Dots` without AMX.
bool multiply_adds_are_faster();

// Calls function(way) with the faster way to multiply with vector instructions.
template <class Function>
static inline void by_vectors(Function function) {
    if (multiply_adds_are_faster()) return function(MultiplyAdds());
#if defined(__AVX512BF16__)
    function(Dots());
#endif
}

// The same for a given number of rows: for a single row, splitting the weights would cost as much as multiplying them.
template <class Function>
static inline void by_vectors([[maybe_unused]] int64_t rows, Function function) {
#if defined(__AVX512BF16__)
    if (rows == 1) return function(Dots());
#endif
    by_vectors(function);
}

// Calls function(way) with the way whose `panel` is the fastest for these numbers of rows and inputs.
template <class Function>
static inline void by_fastest(int64_t rows, [[maybe_unused]] int64_t inputs, Function function) {
#if defined(__AVX512BF16__)
    if (Dots::uses_tiles(inputs)) return function(Dots());
#endif
    by_vectors(rows, function);
}

// Accumulators per output. A product takes several cycles, so few rows need several to keep the units busy.
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

// Prefetches the next tile while a tile is multiplied. Rows are multiplied in `count` parts, one after another; each step,
// which multiplies `width` bytes of weights, prefetches width / count bytes of the next tile into the L2 cache. It also
// prefetches weights that are needed soon into the L1 cache.
struct Ahead {
    static constexpr int64_t SOON = 1024;  // prefetch distance in bytes for the L1 cache
    const char *from, *soon;
    int64_t pitch, width;

    Ahead(const void* w, int64_t steps, int64_t width, int64_t part, int64_t count)
        : from((const char*)w + steps * width), soon((const char*)w + SOON), pitch((width + count - 1) / count),
          width(width) {
        from += part * steps * pitch;
    }
    void step(int64_t at) const {
        _mm_prefetch(from + at * pitch, _MM_HINT_T1);
        if (pitch > 64) _mm_prefetch(from + at * pitch + 64, _MM_HINT_T1);
        _mm_prefetch(soon + at * width, _MM_HINT_T0);
        _mm_prefetch(soon + at * width + 64, _MM_HINT_T0);
    }
};

// Prefetches nothing, for a tile that is in the L1 cache.
struct NothingAhead {
    void step(int64_t) const {}
};

// out[m] = row m of x times one tile, over 2 x `count` inputs.
template <class Way, int M, class Fetch>
static inline __attribute__((always_inline)) void multiply(const typename Way::Input* x, int64_t stride,
                                                           const bfloat16* w, int64_t count, const Fetch& ahead,
                                                           Sums* out) {
    constexpr int U = UNROLL<M>;
    __m512 sums[U][M][2];
    clear(sums);
    int64_t at = 0;
    const auto step = [&](int u) __attribute__((always_inline)) {
        ahead.step(at);
        const typename Way::Weights low(_mm512_loadu_si512(w + at * 64)), high(_mm512_loadu_si512(w + at * 64 + 32));
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const typename Way::Inputs a(x + m * stride + 2 * at);
            sums[u][m][0] = Way::add(sums[u][m][0], low, a);
            sums[u][m][1] = Way::add(sums[u][m][1], high, a);
        }
        ++at;
    };
    // Unrolled by hand, because GCC 12 keeps the accumulators in memory if it unrolls the loop itself.
    if constexpr (U == 1 && std::is_same_v<Fetch, NothingAhead>)
        while (at + 4 <= count) {
            step(0);
            step(0);
            step(0);
            step(0);
        }
    while (at + U <= count) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) step(u);
    }
    while (at < count) step(0);
    add_up<M, U>(sums, out);
}

// Calls function(rows) with `rows`, from 1 to ROWS, as a compile-time constant.
template <class Function>
static inline void with_rows(int64_t rows, Function function) {
    with_constant<ROWS>(rows, function);
}

template <int M>
static inline void store_sums(const Sums* from, float* sums) {
    for (int m = 0; m < M; ++m) {
        _mm512_store_ps(sums + m * TILE, from[m][0]);
        _mm512_store_ps(sums + m * TILE + 16, from[m][1]);
    }
}

template <class Way, int M>
static void sums_of(const typename Way::Input* x, int64_t stride, const bfloat16* w, int64_t inputs, const Ahead& ahead,
                    float* sums) {
    Sums out[M];
    multiply<Way, M>(x, stride, w, inputs / 2, ahead, out);
    store_sums<M>(out, sums);
}

// Number of rows in the next part, if `rows` are split into `parts` nearly equal parts.
static inline int64_t share(int64_t rows, int64_t parts) { return (rows + parts - 1) / parts; }

static inline int64_t panels(int64_t rows) { return parts(rows, PANEL); }

static inline int64_t parts(int64_t rows) { return parts(rows, ROWS); }

// sums (rows, 32) = up to PANEL rows of x times one bfloat16 tile.
template <class Way>
static void panel(const typename Way::Input* x, int64_t stride, int64_t rows, const bfloat16* w, int64_t inputs,
                  float* sums) {
    if constexpr (std::is_same_v<typename Way::Input, bfloat16>)
        if (Way::uses_tiles(inputs)) return amx::panel(x, stride, rows, w, inputs, sums);
    for (int64_t done = 0, left = parts(rows), count; left > 0; --left, done += count) {
        count = share(rows - done, left);
        const Ahead ahead(w, inputs / 2, 128, parts(rows) - left, parts(rows));
        with_rows(count, [&](auto m) {
            sums_of<Way, m()>(x + done * stride, stride, w, inputs, ahead, sums + done * TILE);
        });
    }
}

#endif
