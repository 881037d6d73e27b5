// Linear layers: bfloat16 activations times weights in bfloat16 or in 4 bits, sums in float32.
//
// Weights are packed in tiles of 32 outputs. bfloat16: (outputs / 32, inputs / 2, 32, 2), so that one vector holds two
// inputs of 16 outputs, which VDPBF16PS (AVX512-BF16) and TDPBF16PS (AMX) multiply with two activations. 4 bits:
// (outputs / 32, inputs / 4, 32) 16-bit words of four nibbles. In quad q, word l has o = l / 2, i = 4q + l % 2:
//
//   nibble (from the low one)   0       1            2           3
//   input, output               i, o    i, o + 16    i + 2, o    i + 2, o + 16
//
// A nibble is its value plus 8; VPERMW looks its bfloat16 up.

#include "common.h"

EXPORT int64_t has_matmul() {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    return 1;
#else
    return 0;
#endif
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

#include "amx.h"

#include <immintrin.h>

constexpr int64_t TILE = 32;        // outputs
constexpr int64_t ROWS = 12;        // of activations that fit the registers with a tile's sums
constexpr int64_t PANEL = 64;       // most rows whose sums stay in the first-level cache
constexpr int64_t LARGEST_GROUP = 256;

using Sums = __m512[2];  // of one row: 32 outputs

static inline __m512bh pairs(const void* from) { return (__m512bh)_mm512_loadu_si512(from); }

// Two activations in every lane.
static inline __m512bh both(const bfloat16* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
}

static inline void put_row(bfloat16* y, const float* bias, __m512 low, __m512 high) {
    if (bias) {
        low = _mm512_add_ps(low, _mm512_loadu_ps(bias));
        high = _mm512_add_ps(high, _mm512_loadu_ps(bias + 16));
    }
    _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(high, low));
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

// out[m] = x[m] times one tile, over 2 x `count` inputs.
template <int M>
static inline __attribute__((always_inline)) void multiply(const bfloat16* x, int64_t stride, const bfloat16* w,
                                                           int64_t count, Sums* out) {
    constexpr int U = UNROLL<M>;
    __m512 sums[U][M][2] = {};
    int64_t at = 0;
    const auto step = [&](int u) __attribute__((always_inline)) {
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

alignas(64) static const uint16_t NIBBLES[32] = {  // -8 to 7 in bfloat16, twice: VPERMW ignores all but five bits
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// Four inputs of 32 outputs: two vectors of pairs for the first two inputs, then two for the others.
static inline void unpack(const uint16_t* w, __m512i table, __m512i (&values)[4]) {
    const __m512i words = _mm512_loadu_si512(w);
    values[0] = _mm512_permutexvar_epi16(words, table);
    values[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
    values[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
    values[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
}

static inline void store_values(const __m512i (&values)[4], bfloat16* into) {
    for (int part = 0; part < 4; ++part) _mm512_store_si512(into + part * 32, values[part]);
}

// As `multiply`, over 4 x `count` inputs in 4 bits, without their scales. `count` is even. If KEEP, the weights are
// stored in `expanded` as a bfloat16 tile; between the products that costs little.
template <int M, bool KEEP>
static inline __attribute__((always_inline)) void multiply_int4(const bfloat16* x, int64_t stride, const uint16_t* w,
                                                                int64_t count, bfloat16* expanded, Sums* out) {
    const __m512i table = _mm512_load_si512(NIBBLES);
    constexpr int U = UNROLL<M>;
    __m512 sums[U][M][2] = {};
    for (int64_t at = 0; at < count; at += 2)
#pragma GCC unroll 2
        for (int s = 0; s < 2; ++s) {
            __m512i values[4];
            unpack(w + (at + s) * 32, table, values);
            if (KEEP) store_values(values, expanded + (at + s) * 128);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const int u = (2 * s + half) % U;
#pragma GCC unroll 16
                for (int m = 0; m < M; ++m) {
                    const __m512bh a = both(x + m * stride + 4 * (at + s) + 2 * half);
                    sums[u][m][0] = _mm512_dpbf16_ps(sums[u][m][0], (__m512bh)values[2 * half], a);
                    sums[u][m][1] = _mm512_dpbf16_ps(sums[u][m][1], (__m512bh)values[2 * half + 1], a);
                }
            }
        }
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

// One linear layer: y (rows, outputs) = x (rows, inputs) W^T + bias. `scales`: (outputs / 32, inputs / group, 32).
struct Linear {
    const bfloat16* x;
    const void* weight;
    const float* scales;
    const float* bias;
    bfloat16* y;
    int64_t rows, inputs, outputs, group;
};

template <int M>
static void few_rows(const Linear& l, const bfloat16* x, const bfloat16* w, const float* bias, bfloat16* y) {
    Sums out[M];
    multiply<M>(x, l.inputs, w, l.inputs / 2, out);
    for (int m = 0; m < M; ++m) put_row(y + m * l.outputs, bias, out[m][0], out[m][1]);
}

template <int M>
static void few_rows_int4(const Linear& l, const uint16_t* w, const float* scales, const float* bias, bfloat16* y) {
    __m512 totals[M][2] = {};
    for (int64_t first = 0; first < l.inputs; first += l.group, scales += TILE) {
        Sums out[M];
        multiply_int4<M, false>(l.x + first, l.inputs, w + first * 8, l.group / 4, nullptr, out);
        const __m512 low = _mm512_loadu_ps(scales), high = _mm512_loadu_ps(scales + 16);
        for (int m = 0; m < M; ++m) {
            totals[m][0] = _mm512_fmadd_ps(out[m][0], low, totals[m][0]);
            totals[m][1] = _mm512_fmadd_ps(out[m][1], high, totals[m][1]);
        }
    }
    for (int m = 0; m < M; ++m) put_row(y + m * l.outputs, bias, totals[m][0], totals[m][1]);
}

template <int M>
static inline void store_sums(const Sums* from, float* sums) {
    for (int m = 0; m < M; ++m) {
        _mm512_store_ps(sums + m * TILE, from[m][0]);
        _mm512_store_ps(sums + m * TILE + 16, from[m][1]);
    }
}

template <int M>
static void sums_of(const bfloat16* x, int64_t stride, const bfloat16* w, int64_t inputs, float* sums) {
    Sums out[M];
    multiply<M>(x, stride, w, inputs / 2, out);
    store_sums<M>(out, sums);
}

template <int M>
static void sums_of_int4(const bfloat16* x, int64_t stride, const uint16_t* w, int64_t inputs, bfloat16* expanded,
                         float* sums) {
    Sums out[M];
    multiply_int4<M, true>(x, stride, w, inputs / 4, expanded, out);
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
        FOR_ROWS(count, sums_of, x + done * stride, stride, w, inputs, sums + done * TILE);
    }
}

// As `panel`, of a tile in 4 bits without its scales, which the first rows expand for the others.
static void panel_int4(const bfloat16* x, int64_t stride, int64_t rows, const uint16_t* w, int64_t inputs,
                       float* sums) {
    alignas(64) bfloat16 expanded[LARGEST_GROUP * TILE];
    int64_t first = 0;
    if (amx::suits(rows, inputs)) {
        const __m512i table = _mm512_load_si512(NIBBLES);
        for (int64_t quad = 0; quad < inputs / 4; ++quad) {
            __m512i values[4];
            unpack(w + quad * 32, table, values);
            store_values(values, expanded + quad * 128);
        }
    } else {
        first = share(rows, parts(rows));
        FOR_ROWS(first, sums_of_int4, x, stride, w, inputs, expanded, sums);
    }
    panel(x + first * stride, stride, rows - first, expanded, inputs, sums + first * TILE);
}

static void put_panel(const Linear& l, const float* sums, int64_t rows, const float* bias, bfloat16* y) {
    for (int64_t m = 0; m < rows; ++m)
        put_row(y + m * l.outputs, bias, _mm512_load_ps(sums + m * TILE), _mm512_load_ps(sums + m * TILE + 16));
}

static void tile_bfloat16(const Linear& l, const bfloat16* w, const float* bias, bfloat16* y) {
    alignas(64) float sums[PANEL * TILE];
    if (l.rows <= ROWS && !amx::suits(l.rows, l.inputs)) {
        FOR_ROWS(l.rows, few_rows, l, l.x, w, bias, y);
        return;
    }
    for (int64_t first = 0, left = panels(l.rows), rows; left > 0; --left, first += rows) {
        rows = share(l.rows - first, left);
        panel(l.x + first * l.inputs, l.inputs, rows, w, l.inputs, sums);
        put_panel(l, sums, rows, bias, y + first * l.outputs);
    }
}

// totals (rows, 32) += sums times their outputs' scales; `fresh`: totals holds nothing yet.
static void add_scaled(const float* sums, const float* scales, int64_t rows, bool fresh, float* totals) {
    for (int half = 0; half < 2; ++half) {
        const __m512 factors = _mm512_loadu_ps(scales + half * 16);
        for (int64_t at = half * 16; at < rows * TILE; at += TILE) {
            const __m512 before = fresh ? _mm512_setzero_ps() : _mm512_load_ps(totals + at);
            _mm512_store_ps(totals + at, _mm512_fmadd_ps(_mm512_load_ps(sums + at), factors, before));
        }
    }
}

static void tile_int4(const Linear& l, const uint16_t* w, const float* scales, const float* bias, bfloat16* y) {
    if (l.rows <= ROWS) {
        FOR_ROWS(l.rows, few_rows_int4, l, w, scales, bias, y);
        return;
    }
    alignas(64) float sums[PANEL * TILE], totals[PANEL * TILE];
    for (int64_t start = 0, left = panels(l.rows), rows; left > 0; --left, start += rows) {
        rows = share(l.rows - start, left);
        for (int64_t first = 0; first < l.inputs; first += l.group) {
            panel_int4(l.x + start * l.inputs + first, l.inputs, rows, w + first * 8, l.group, sums);
            add_scaled(sums, scales + first / l.group * TILE, rows, first == 0, totals);
        }
        put_panel(l, totals, rows, bias, y + start * l.outputs);
    }
}

// Calls compute(first output, its bias, its first result) for every tile. `depth`: inputs of one product of a panel.
template <class Compute>
static void for_each_tile(const Linear& l, int64_t depth, Compute compute) {
    if (l.rows == 0) return;
#pragma omp parallel
    {
        amx::Session session(l.rows, depth);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < l.outputs; first += TILE)
            compute(first, l.bias ? l.bias + first : nullptr, l.y + first);
    }
}

EXPORT void linear_bfloat16(const Linear* given) {
    const Linear& l = *given;
    for_each_tile(l, l.inputs, [&l](int64_t first, const float* bias, bfloat16* y) {
        tile_bfloat16(l, (const bfloat16*)l.weight + first * l.inputs, bias, y);
    });
}

EXPORT void linear_int4(const Linear* given) {
    const Linear& l = *given;
    for_each_tile(l, l.group, [&l](int64_t first, const float* bias, bfloat16* y) {
        tile_int4(l, (const uint16_t*)l.weight + first * l.inputs / 4, l.scales + first * (l.inputs / l.group), bias, y);
    });
}

#endif
