// Linear layers of SmoothQuant: activations rounded to 8 bits by one scale, weights in 8 bits, sums in 32 bits.
//
// Weights are packed in tiles of 32 outputs, (outputs / 32, inputs / 4, 32, 4): VPDPBUSD (AVX512-VNNI) and TDPBUSD (AMX)
// multiply four unsigned bytes with four signed ones. Activations get 128 added to be unsigned, and sums `offsets`: -128
// times the sum of an output's weights.

#include "linears.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

EXPORT int64_t has_integers() {
#if defined(HAS_PRODUCTS) && defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

#if defined(HAS_PRODUCTS) && defined(__AVX512VNNI__)

// Rounds halves to even and saturates, as `round_to_int8` does.
template <typename T>
static void round_row(const T* x, const float* prequant, float scale, int64_t inputs, uint8_t* codes) {
    const __m512 lowest = _mm512_set1_ps(-128.0f), largest = _mm512_set1_ps(127.0f);
    for (int64_t i = 0; i < inputs; i += WIDTH) {
        const __m512 exact = (__m512)(load(x + i) * load(prequant + i) / scale);
        const __m512 inside = _mm512_min_ps(_mm512_max_ps(exact, lowest), largest);
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(inside));
        _mm_storeu_si128((__m128i*)(codes + i), _mm_xor_si128(bytes, _mm_set1_epi8(-128)));
    }
}

template <typename T>
struct Tile {
    const IntegerLinear& l;
    int64_t first;  // output

    void put_row(int64_t row, __m512i low, __m512i high) const {
        T* y = (T*)l.y + row * l.outputs + first;
        for (int64_t half = 0; half < 2; ++half) {
            const __m512i sums = half == 0 ? low : high;
            const int32_t* offsets = l.offsets + first + half * WIDTH;
            Vector v = (Vector)_mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_loadu_si512(offsets)));
            v *= load(l.scales + first + half * WIDTH);
            if (l.bias) v += load(l.bias + first + half * WIDTH);
            put(y + half * WIDTH, v);
        }
    }
};

template <int M, typename T>
static void rows_of(const Tile<T>& tile, int64_t row, const int8_t* w, const Ahead& ahead) {
    constexpr int U = UNROLL<M>;
    const int64_t inputs = tile.l.inputs;
    const uint8_t* x = tile.l.codes + row * inputs;
    __m512i sums[U][M][2] = {};
    int64_t at = 0;
    const auto step = [&](int u) __attribute__((always_inline)) {
        ahead.step(at / 4);
        const __m512i low = _mm512_loadu_si512(w + at * 32), high = _mm512_loadu_si512(w + at * 32 + 64);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            int32_t four;
            std::memcpy(&four, x + m * inputs + at, sizeof four);
            const __m512i a = _mm512_set1_epi32(four);
            sums[u][m][0] = _mm512_dpbusd_epi32(sums[u][m][0], a, low);
            sums[u][m][1] = _mm512_dpbusd_epi32(sums[u][m][1], a, high);
        }
        at += 4;
    };
    while (at + 4 * U <= inputs) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) step(u);
    }
    while (at < inputs) step(0);
    for (int m = 0; m < M; ++m) {
        __m512i low = sums[0][m][0], high = sums[0][m][1];
        for (int u = 1; u < U; ++u) {
            low = _mm512_add_epi32(low, sums[u][m][0]);
            high = _mm512_add_epi32(high, sums[u][m][1]);
        }
        tile.put_row(row + m, low, high);
    }
}

template <typename T>
static void multiply_tile(const Tile<T>& tile, const int8_t* w) {
    const IntegerLinear& l = tile.l;
    if (!amx::suits<uint8_t>(l.rows, l.inputs)) {
        for (int64_t row = 0, left = parts(l.rows), count; left > 0; --left, row += count) {
            count = share(l.rows - row, left);
            const Ahead ahead(w, l.inputs / 4, 128, parts(l.rows) - left, parts(l.rows));
            with_rows(count, [&](auto m) { rows_of<m()>(tile, row, w, ahead); });
        }
        return;
    }
    alignas(64) int32_t sums[PANEL * TILE];
    for (int64_t row = 0, left = panels(l.rows), count; left > 0; --left, row += count) {
        count = share(l.rows - row, left);
        amx::panel(l.codes + row * l.inputs, l.inputs, count, w, l.inputs, sums);
        for (int64_t m = 0; m < count; ++m)
            tile.put_row(row + m, _mm512_load_si512(sums + m * TILE), _mm512_load_si512(sums + m * TILE + 16));
    }
}

template <typename T>
static void multiply_all(const IntegerLinear& l) {
    if (l.rows == 0) return;
    team::run(true, [&](team::Member& member) {
        member.each(l.rows, [&](int64_t row) {
            round_row((const T*)l.x + row * l.inputs, l.prequant, l.activation_scale, l.inputs,
                      l.codes + row * l.inputs);
        });
        member.barrier();
        const amx::Session session(l.rows, amx::suits<uint8_t>(l.rows, l.inputs));
        member.each(l.outputs / TILE, [&](int64_t tile) {
            multiply_tile(Tile<T>{l, tile * TILE}, l.weight + tile * TILE * l.inputs);
        });
    });
}

EXPORT void linear_int8(int64_t type, const IntegerLinear* l) {
    if (type == FLOAT32)
        multiply_all<float>(*l);
    else
        multiply_all<bfloat16>(*l);
}

#endif
