// SmoothQuant linear layers: activations rounded to 8 bits with one scale, 8-bit weights, 32-bit accumulators.
//
// Weights are packed in tiles of 32 outputs, (outputs / 32, inputs / 4, 32, 4): VPDPBUSD (AVX512-VNNI) and TDPBUSD (AMX)
// compute dot products of four unsigned and four signed bytes. 128 is added to activations to make them unsigned; `offsets`,
// -128 times the sum of an output's weights, are added to the sums to correct for it.

#include "amx_blocks.h"
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

// Rows that are multiplied together. Their codes are (inputs / 4, count, 4), so the codes of one step are contiguous.
struct Part {
    int64_t first, count;
};

// Part `index` of `parts` nearly equal parts.
static inline Part part_of(int64_t rows, int64_t parts, int64_t index) {
    const int64_t least = rows / parts, longer = rows % parts;
    return {index * least + std::min(index, longer), least + (index < longer)};
}

constexpr int64_t SECTION = 256;    // inputs that one thread rounds
constexpr int64_t FETCHED = 16384;  // bytes of a thread's first tile that are prefetched before inputs are rounded

// Rounds `count` of a row's inputs, ties to even, and saturates, like `round_to_int8`. Each four codes are contiguous; the next
// four are `pitch` bytes later.
template <typename T>
static void round_inputs(const T* x, const float* prequant, float scale, int64_t count, int64_t pitch, uint8_t* codes) {
    const __m512 lowest = _mm512_set1_ps(-128.0f), largest = _mm512_set1_ps(127.0f);
    for (int64_t i = 0; i < count; i += WIDTH, codes += 4 * pitch) {
        const __m512 exact = (__m512)(load(x + i) * load(prequant + i) / scale);
        const __m512 inside = _mm512_min_ps(_mm512_max_ps(exact, lowest), largest);
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(inside));
        const __m128i from_zero = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
        _mm_storeu_si32(codes, from_zero);
        _mm_storeu_si32(codes + pitch, _mm_shuffle_epi32(from_zero, 1));
        _mm_storeu_si32(codes + 2 * pitch, _mm_shuffle_epi32(from_zero, 2));
        _mm_storeu_si32(codes + 3 * pitch, _mm_shuffle_epi32(from_zero, 3));
    }
}

template <typename T>
static void round_part(const IntegerLinear& l, Part part, int64_t input, int64_t count) {
    uint8_t* codes = l.codes + part.first * l.inputs + input * part.count;
    for (int64_t m = 0; m < part.count; ++m) {
        const T* x = (const T*)l.x + (part.first + m) * l.inputs + input;
        round_inputs(x, l.prequant + input, l.activation_scale, count, part.count * 4, codes + m * 4);
    }
}

template <typename T>
struct Tile {
    const IntegerLinear& l;
    int64_t first;  // output

    void put(int64_t row, int64_t rows, const int32_t* sums) const {
        for (int64_t m = 0; m < rows; ++m)
            put_row(row + m, _mm512_load_si512(sums + m * TILE), _mm512_load_si512(sums + m * TILE + 16));
    }

    void put_row(int64_t row, __m512i low, __m512i high) const {
        ::put((T*)l.y + row * l.outputs + first, exact(0, low), exact(WIDTH, high));
    }

    // Dequantises sums of the outputs from `half` on, and adds the bias.
    Vector exact(int64_t half, __m512i sums) const {
        const int32_t* offsets = l.offsets + first + half;
        Vector v = (Vector)_mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_loadu_si512(offsets)));
        v *= load(l.scales + first + half);
        if (l.bias) v += load(l.bias + first + half);
        return v;
    }
};

// sums + dot products of four bytes. Inline assembly, because GCC 12 moves the intrinsic's accumulators between registers and
// to memory.
static inline __m512i add_products(__m512i sums, __m512i bytes, __m512i weights) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(weights));
    return sums;
}

// A tile's outputs for M rows from `row` on. The number of inputs is a multiple of 4 UNROLL<1>.
template <int M, typename T>
static void multiply_part(const Tile<T>& tile, int64_t row, const int8_t* w, const Ahead& ahead) {
    constexpr int U = UNROLL<M>;
    const uint8_t* x = tile.l.codes + row * tile.l.inputs;
    __m512i sums[U][M][2];
    clear(sums);
    const auto step = [&](int u, int64_t at) __attribute__((always_inline)) {
        ahead.step(at);
        const __m512i low = _mm512_loadu_si512(w + at * 128), high = _mm512_loadu_si512(w + at * 128 + 64);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            int32_t four;
            std::memcpy(&four, x + (at * M + m) * 4, sizeof four);
            const __m512i bytes = _mm512_set1_epi32(four);
            sums[u][m][0] = add_products(sums[u][m][0], bytes, low);
            sums[u][m][1] = add_products(sums[u][m][1], bytes, high);
        }
    };
    for (int64_t at = 0; at < tile.l.inputs / 4; at += U) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) step(u, at + u);
    }
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
    const int64_t count = parts(l.rows);
    for (int64_t index = 0; index < count; ++index) {
        const Part part = part_of(l.rows, count, index);
        const Ahead ahead(w, l.inputs / 4, 128, index, count);
        with_rows(part.count, [&](auto m) { multiply_part<m()>(tile, part.first, w, ahead); });
    }
}

template <typename T>
static void by_vectors(const IntegerLinear& l) {
    const int64_t tiles = l.outputs / TILE, count = parts(l.rows), sections = (l.inputs + SECTION - 1) / SECTION;
    team::run(true, [&](team::Member& member) {
        prefetch(l.weight + member.first_of(member.thread, tiles) * TILE * l.inputs, FETCHED);
        member.each(count * sections, [&](int64_t at) {
            const int64_t first = at % sections * SECTION, inputs = std::min(SECTION, l.inputs - first);
            round_part<T>(l, part_of(l.rows, count, at / sections), first, inputs);
        });
        member.barrier();
        member.each(tiles, [&](int64_t tile) {
            multiply_tile(Tile<T>{l, tile * TILE}, l.weight + tile * TILE * l.inputs);
        });
    });
}

#if defined(HAS_AMX)

template <typename T>
static void by_tiles(const IntegerLinear& l) {
    constexpr int64_t DEPTH = amx::DEPTH<uint8_t>;
    const auto round = [&](int64_t row, const amx::Row<uint8_t>& into, int64_t first, int64_t count) {
        const T* x = (const T*)l.x + row * l.inputs;
        for (int64_t i = first; i < first + count; i += DEPTH)
            round_inputs(x + i, l.prequant + i, l.activation_scale, DEPTH, 4, into.at(i));
    };
    amx::for_each_tile<uint8_t>(l.rows, l.inputs, l.outputs, SECTION, round, [&](const auto& codes, int64_t tile) {
        amx::multiply_tile<int32_t>(codes, l.weight + tile * TILE * l.inputs, Tile<T>{l, tile * TILE});
    });
}

#endif

template <typename T>
static void multiply_all(const IntegerLinear& l) {
    if (l.rows == 0) return;
#if defined(HAS_AMX)
    if (amx::suits<uint8_t>(l.inputs)) return by_tiles<T>(l);
#endif
    by_vectors<T>(l);
}

EXPORT void linear_int8(int64_t type, const IntegerLinear* l) {
    if (type == FLOAT32)
        multiply_all<float>(*l);
    else
        multiply_all<bfloat16>(*l);
}

#endif
