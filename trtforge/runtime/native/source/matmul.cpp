// Linear layers: bfloat16 activations times bfloat16 or 4-bit weights, accumulated in float32.
//
// Weights are packed in tiles of 32 outputs. bfloat16: (outputs / 32, inputs / 2, 32, 2), see products.h. 4 bits:
// (outputs / 32, inputs / 4, 32) 16-bit words of four nibbles. Word l of quad q has, with o = l / 2 and i = 4q + l % 2:
//
//   nibble (from the low one)   0       1            2           3
//   input, output               i, o    i, o + 16    i + 2, o    i + 2, o + 16
//
// A nibble is the weight plus 8; VPERMW looks up the weight in bfloat16.

#include "amx_blocks.h"
#include "linears.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

#include <cstdlib>

EXPORT int64_t has_matmul() {
#if defined(HAS_PRODUCTS)
    return 1;
#else
    return 0;
#endif
}

#if defined(HAS_PRODUCTS)

static inline void put_row(bfloat16* y, const float* bias, __m512 low, __m512 high) {
    if (bias) {
        low = _mm512_add_ps(low, _mm512_loadu_ps(bias));
        high = _mm512_add_ps(high, _mm512_loadu_ps(bias + 16));
    }
    put(y, (Vector)low, (Vector)high);
}

alignas(64) static const uint16_t NIBBLES[32] = {  // -8 to 7 in bfloat16, twice, as VPERMW uses five bits
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// Unpacks four inputs of 32 outputs: two vectors of pairs for the first two inputs, then two for the others.
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

// Like `multiply`, over 4 x `count` inputs of a tile of `tile` words in 4 bits, without scales. `count` is even. If KEEP, also
// stores the weights in `expanded` as a bfloat16 tile, which costs little when interleaved with the products.
template <class Way, int M, bool KEEP>
static inline __attribute__((always_inline)) void multiply_int4(const typename Way::Input* x, int64_t stride,
                                                                const uint16_t* w, int64_t count, int64_t tile,
                                                                bfloat16* expanded, Sums* out) {
    const __m512i table = _mm512_load_si512(NIBBLES);
    constexpr int U = !KEEP && (M == 4 || M == 5) ? 2 : UNROLL<M>;  // more than for bfloat16 weights from memory
    __m512 sums[U][M][2];
    clear(sums);
    for (int64_t at = 0; at < count; at += 2)
#pragma GCC unroll 2
        for (int s = 0; s < 2; ++s) {
            __m512i values[4];
            unpack(w + (at + s) * 32, table, values);
            _mm_prefetch(w + (at + s) * 32 + tile, _MM_HINT_T1);
            if (KEEP) store_values(values, expanded + (at + s) * 128);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const int u = (2 * s + half) % U;
                const typename Way::Weights low(values[2 * half]), high(values[2 * half + 1]);
#pragma GCC unroll 16
                for (int m = 0; m < M; ++m) {
                    const typename Way::Inputs a(x + m * stride + 4 * (at + s) + 2 * half);
                    sums[u][m][0] = Way::add(sums[u][m][0], low, a);
                    sums[u][m][1] = Way::add(sums[u][m][1], high, a);
                }
            }
        }
    add_up<M, U>(sums, out);
}

template <class Way, int M>
static void few_rows(const Linear& l, const typename Way::Input* x, const bfloat16* w, const float* bias, bfloat16* y) {
    Sums out[M];
    multiply<Way, M>(x, l.inputs, w, l.inputs / 2, Ahead(w, l.inputs / 2, 128, 0, 1), out);
    for (int m = 0; m < M; ++m) put_row(y + m * l.outputs, bias, out[m][0], out[m][1]);
}

// Source of the weights in `rows_int4`: 4 bits; 4 bits, which it also stores as bfloat16; or the stored bfloat16.
enum Expansion { NOT_KEPT, KEPT, FROM_KEPT };

// Multiplies M rows by a 4-bit tile; `expanded`: memory for the tile in bfloat16.
template <class Way, int M>
static void rows_int4(const Linear& l, Expansion expansion, const typename Way::Input* x, const uint16_t* w,
                      const float* scales, const float* bias, bfloat16* expanded, bfloat16* y) {
    __m512 totals[M][2];
    clear(totals);
    for (int64_t first = 0; first < l.inputs; first += l.group, scales += TILE) {
        Sums out[M];
        const int64_t tile = l.inputs * 8;
        bfloat16* values = expanded + first * TILE;
        if (expansion == NOT_KEPT)
            multiply_int4<Way, M, false>(x + first, l.inputs, w + first * 8, l.group / 4, tile, nullptr, out);
        else if (expansion == KEPT)
            multiply_int4<Way, M, true>(x + first, l.inputs, w + first * 8, l.group / 4, tile, values, out);
        else
            multiply<Way, M>(x + first, l.inputs, values, l.group / 2, NothingAhead(), out);
        const __m512 low = _mm512_loadu_ps(scales), high = _mm512_loadu_ps(scales + 16);
        for (int m = 0; m < M; ++m) {
            totals[m][0] = _mm512_fmadd_ps(out[m][0], low, totals[m][0]);
            totals[m][1] = _mm512_fmadd_ps(out[m][1], high, totals[m][1]);
        }
    }
    for (int m = 0; m < M; ++m) put_row(y + m * l.outputs, bias, totals[m][0], totals[m][1]);
}

static inline const float* bias_of(const Linear& l, int64_t first) { return l.bias ? l.bias + first : nullptr; }

static void put_panel(const Linear& l, const float* sums, int64_t rows, const float* bias, bfloat16* y) {
    for (int64_t m = 0; m < rows; ++m)
        put_row(y + m * l.outputs, bias, _mm512_load_ps(sums + m * TILE), _mm512_load_ps(sums + m * TILE + 16));
}

template <class Way>
static void tile_bfloat16(const Linear& l, const typename Way::Input* x, const bfloat16* w, const float* bias,
                          bfloat16* y) {
    alignas(64) float sums[PANEL * TILE];
    if (l.rows <= ROWS)
        return with_rows(l.rows, [&](auto m) { few_rows<Way, m()>(l, x, w, bias, y); });
    for (int64_t first = 0, left = panels(l.rows), rows; left > 0; --left, first += rows) {
        rows = share(l.rows - first, left);
        panel<Way>(x + first * l.inputs, l.inputs, rows, w, l.inputs, sums);
        put_panel(l, sums, rows, bias, y + first * l.outputs);
    }
}

// `expanded`: memory for the tile in bfloat16 if there are more than ROWS rows.
template <class Way>
static void tile_int4(const Linear& l, const typename Way::Input* x, const uint16_t* w, const float* scales,
                      const float* bias, bfloat16* expanded, bfloat16* y) {
    Expansion expansion = l.rows <= ROWS ? NOT_KEPT : KEPT;
    for (int64_t done = 0, left = parts(l.rows), rows; left > 0; --left, done += rows) {
        rows = share(l.rows - done, left);
        with_rows(rows, [&](auto m) {
            rows_int4<Way, m()>(l, expansion, x + done * l.inputs, w, scales, bias, expanded, y + done * l.outputs);
        });
        expansion = FROM_KEPT;
    }
}

static void scale_rows(const Linear& l) {
    team::for_each(l.rows, l.rows * l.inputs >= 16384, [&](int64_t row) {
        const bfloat16* x = l.x + row * l.inputs;
        for (int64_t i = 0; i < l.inputs; i += WIDTH)
            put(l.scaled + row * l.inputs + i, load(x + i) * load(l.prequant + i));
    });
}

// Memory for elements of type T, aligned to 64 bytes.
template <class T>
class Aligned {
  public:
    explicit Aligned(int64_t count)
        : memory(count ? (T*)std::aligned_alloc(64, size_t(count * int64_t(sizeof(T)) + 63) / 64 * 64) : nullptr) {}
    ~Aligned() { std::free(memory); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    T* data() { return memory; }

  private:
    T* const memory;
};

// The activations in the type that `Dots` or `MultiplyAdds` reads: in place, or copied to float32.
static const bfloat16* activations(const Linear& l, team::Member&, bfloat16*) { return l.x; }

static const float* activations(const Linear& l, team::Member& member, float* copy) {
    member.each(l.rows, [&](int64_t row) {
        const bfloat16* x = l.x + row * l.inputs;
        float* into = copy + row * l.inputs;
        int64_t i = 0;
        for (; i + WIDTH <= l.inputs; i += WIDTH) put(into + i, load(x + i));
        for (; i < l.inputs; ++i) into[i] = to_float(x[i]);
    });
    member.barrier();
    return copy;
}

// Calls compute(l, activations, first output, memory) for every tile. `needed`: number of bfloat16 elements in each thread's
// memory, which is aligned to 64 bytes.
template <class Way, class Compute>
static void for_each_tile(const Linear& l, int64_t needed, Compute compute) {
    using Input = typename Way::Input;
    Aligned<Input> copy(std::is_same_v<Input, float> ? l.rows * l.inputs : 0);
    team::run(true, [&](team::Member& member) {
        const Input* x = activations(l, member, copy.data());
        Aligned<bfloat16> memory(needed);
        member.each(l.outputs / TILE, [&](int64_t tile) { compute(l, x, tile * TILE, memory.data()); });
    });
}

constexpr int64_t BLOCK = 256;  // rows that are copied to float32 at once, so that the copies stay in a cache

// `for_each_tile` with the faster way to multiply; if that copies rows, block by block. Calls compute(way, l, ...).
template <class Compute>
static void multiply_all(const Linear& l, int64_t needed, Compute compute) {
    by_vectors(l.rows, [&](auto way) {
        using Way = decltype(way);
        const int64_t most = std::is_same_v<typename Way::Input, float> ? BLOCK : l.rows;
        for (int64_t first = 0; first < l.rows; first += most) {
            Linear block = l;
            block.rows = std::min(most, l.rows - first);
            block.x += first * l.inputs;
            block.y += first * l.outputs;
            for_each_tile<Way>(block, needed, [&](const auto&... given) { compute(way, given...); });
        }
    });
}

#if defined(HAS_AMX)

// With AMX, a thread computes a tile's outputs for all rows of a block.

constexpr int64_t SECTION = 256;  // inputs that one thread packs

// Packs a row's inputs, multiplied by `prequant` if there is one.
static void pack_row(const Linear& l, int64_t row, const amx::Row<bfloat16>& into, int64_t first, int64_t count) {
    const bfloat16* x = l.x + row * l.inputs;
    for (int64_t i = first; i < first + count; i += amx::DEPTH<bfloat16>) {
        bfloat16* packed = into.at(i);
        for (int64_t half = 0; half < amx::DEPTH<bfloat16>; half += WIDTH)
            if (l.prequant)
                put(packed + half, load(x + i + half) * load(l.prequant + i + half));
            else
                std::memcpy(packed + half, x + i + half, WIDTH * sizeof(bfloat16));
    }
}

static inline void expand_inputs(const uint16_t* w, bfloat16* expanded) {
    constexpr int64_t AHEAD = 4096;  // prefetch distance in words
    const __m512i table = _mm512_load_si512(NIBBLES);
#pragma GCC unroll 8
    for (int64_t quad = 0; quad < amx::DEPTH<bfloat16> / 4; ++quad) {
        __m512i values[4];
        unpack(w + quad * 32, table, values);
        _mm_prefetch(w + quad * 32 + AHEAD, _MM_HINT_T1);
        store_values(values, expanded + quad * 128);
    }
}

// Writes a tile's outputs, from output `first` on, to l.y.
struct Output {
    const Linear& l;
    int64_t first;

    bfloat16* at(int64_t row) const { return l.y + row * l.outputs + first; }
    void put(int64_t row, int64_t rows, const float* sums) const { put_panel(l, sums, rows, bias_of(l, first), at(row)); }
};

static void block_bfloat16(const Linear& l, const amx::Block<bfloat16>& x, int64_t first) {
    amx::multiply_tile<float>(x, (const bfloat16*)l.weight + first * l.inputs, Output{l, first});
}

static void block_int4(const Linear& l, const amx::Block<bfloat16>& x, int64_t first) {
    const uint16_t* w = (const uint16_t*)l.weight + first * l.inputs / 4;
    const auto expand = [&](int64_t input, bfloat16* into) { expand_inputs(w + input * 8, into); };
    amx::multiply_expanded(x, l.group, l.scales + first * (l.inputs / l.group), expand, Output{l, first});
}

// Computes y with AMX; returns false if AMX cannot multiply `depth` inputs.
static bool by_tiles(const Linear& l, int64_t depth, void (*multiply)(const Linear&, const amx::Block<bfloat16>&, int64_t)) {
    if (!amx::suits(depth)) return false;
    const auto of_block = [&](const auto& block, int64_t tile) { multiply(l, block, tile * TILE); };
    if (l.rows <= amx::HEIGHT && !l.prequant)
        amx::for_each_tile_unpacked(l.x, l.rows, l.inputs, l.outputs, of_block);
    else
        amx::for_each_tile<bfloat16>(
            l.rows, l.inputs, l.outputs, SECTION,
            [&](int64_t row, const auto& into, int64_t first, int64_t count) { pack_row(l, row, into, first, count); },
            of_block);
    return true;
}

#endif

EXPORT void linear_bfloat16(const Linear* l) {
#if defined(HAS_AMX)
    if (by_tiles(*l, l->inputs, block_bfloat16)) return;
#endif
    multiply_all(*l, 0, [](auto way, const Linear& block, const auto* x, int64_t first, bfloat16*) {
        const bfloat16* w = (const bfloat16*)block.weight + first * block.inputs;
        tile_bfloat16<decltype(way)>(block, x, w, bias_of(block, first), block.y + first);
    });
}

EXPORT void linear_int4(const Linear* given) {
#if defined(HAS_AMX)
    if (by_tiles(*given, given->group, block_int4)) return;
#endif
    Linear l = *given;
    if (l.prequant) {
        scale_rows(l);
        l.x = l.scaled;
    }
    const int64_t needed = l.rows > ROWS ? l.inputs * TILE : 0;
    multiply_all(l, needed, [](auto way, const Linear& block, const auto* x, int64_t first, bfloat16* memory) {
        const uint16_t* w = (const uint16_t*)block.weight + first * block.inputs / 4;
        const float* scales = block.scales + first * (block.inputs / block.group);
        tile_int4<decltype(way)>(block, x, w, scales, bias_of(block, first), memory, block.y + first);
    });
}

#endif
