// Context attention: many query tokens of one sequence, keys and values read from the blocks where they are.
//
// Algorithm: Dao 2023 (FlashAttention-2): keys are taken in blocks, with a running maximum and sum of every row's
// softmax. Queries times keys and probabilities times values are products of bfloat16 as in products.h: for each block
// of keys two tiles of 32 keys, then a tile for every 32 numbers of a value.

#include "products.h"
#include "team.h"
#include "vectors.h"

#include <limits>
#include <utility>
#include <vector>

#if defined(HAS_PRODUCTS)

constexpr int64_t KEYS = 64;     // of a block
constexpr int64_t QUERIES = 64;  // tokens of a block: a panel of every head
constexpr int64_t HEADS = 4;     // query heads that share a block of keys at once

// table: block numbers; a token's slot holds 2 x `kv_heads` vectors of `size`, a multiple of 32: keys before values.
// queries: (count, heads or more, size), `stride` from token to token, at positions from `start` on. `packed`: memory
// for 2 x `kv_heads` x `size` numbers of all keys that are seen, rounded up to blocks at both ends. The rest as `Paged`
// in attention.cpp.
struct Context {
    const bfloat16* queries;
    const void* cache;
    bfloat16* out;
    const int64_t* table;
    const float* slopes;
    bfloat16* packed;
    int64_t count, start, block, stride, heads, kv_heads, size, window;
    float scale, cap, cache_scale;

    int64_t first_seen(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
    int64_t first_block() const { return first_seen(start) / KEYS; }
    int64_t end_block() const { return (start + count + KEYS - 1) / KEYS; }

    // Where a block of one head's keys is packed; its values follow.
    bfloat16* at(int64_t kv, int64_t key_block) const {
        return packed + (kv * (end_block() - first_block()) + key_block - first_block()) * 2 * KEYS * size;
    }
};

static inline void expand(const bfloat16* from, int64_t size, bfloat16* into) {
    std::memcpy(into, from, size_t(size) * sizeof(bfloat16));
}

template <typename C>
static inline void expand(const C* from, int64_t size, bfloat16* into) {
    for (int64_t i = 0; i < size; i += WIDTH) put(into + i, load(from + i));
}

// Rows of 16 pairs of numbers become columns.
static inline void transpose(__m512i (&rows)[16]) {
    __m512i parts[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        parts[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        parts[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
        for (int odd = 0; odd < 2; ++odd) {  // rows[i + j]: in its lane l, column 4 l + j of the rows from i on
            rows[i + 2 * odd] = _mm512_unpacklo_epi64(parts[i + odd], parts[i + 2 + odd]);
            rows[i + 2 * odd + 1] = _mm512_unpackhi_epi64(parts[i + odd], parts[i + 2 + odd]);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);  // lanes 0 and 2 of both
        const __m512i b = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);  // lanes 1 and 3
        const __m512i c = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
        parts[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        parts[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
        parts[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        parts[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    std::copy(parts, parts + 16, rows);
}

// keys (KEYS, size) to two tiles (size / 2, 32, 2).
static void pack_keys(const bfloat16* keys, int64_t size, bfloat16* into) {
    for (int64_t key = 0; key < KEYS; key += 16)
        for (int64_t column = 0; column < size; column += 32) {
            __m512i rows[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(keys + (key + i) * size + column);
            transpose(rows);
            bfloat16* first = into + key / TILE * TILE * size + column * TILE + key % TILE * 2;
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(first + i * 2 * TILE, rows[i]);
        }
}

// values (KEYS, size) to size / 32 tiles (KEYS / 2, 32, 2).
static void pack_values(const bfloat16* values, int64_t size, bfloat16* into) {
    const __m512i front = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                           5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    for (int64_t column = 0; column < size; column += TILE)
        for (int64_t key = 0; key < KEYS; key += 2) {
            const __m512i even = _mm512_loadu_si512(values + key * size + column);
            const __m512i odd = _mm512_loadu_si512(values + (key + 1) * size + column);
            bfloat16* pairs = into + column * KEYS + key * TILE;
            _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(even, front, odd));
            _mm512_storeu_si512(pairs + TILE, _mm512_permutex2var_epi16(even, back, odd));
        }
}

// Packs the keys and values of one head in one block; those beyond the sequence are zero.
template <typename C>
static void pack(const Context& c, int64_t kv, int64_t key_block, bfloat16* rows) {
    const int64_t first = key_block * KEYS, tokens = std::min(KEYS, c.start + c.count - first);
    for (int64_t part = 0; part < 2; ++part) {
        for (int64_t token = 0; token < tokens;) {
            const int64_t offset = (first + token) % c.block, end = std::min(tokens, token + c.block - offset);
            const int64_t slot = c.table[(first + token) / c.block] * c.block + offset, pitch = 2 * c.kv_heads * c.size;
            const C* from = (const C*)c.cache + slot * pitch + (part * c.kv_heads + kv) * c.size;
            for (; token < end; ++token, from += pitch) expand(from, c.size, rows + token * c.size);
        }
        std::memset((void*)(rows + tokens * c.size), 0, size_t((KEYS - tokens) * c.size) * sizeof(bfloat16));
        bfloat16* into = c.at(kv, key_block) + part * KEYS * c.size;
        part == 0 ? pack_keys(rows, c.size, into) : pack_values(rows, c.size, into);
    }
}

// A thread's memory: of every head's rows the largest score, the sum of probabilities, and the weighted values. `copy`:
// the queries of all heads, where they are needed in float32.
struct Running {
    float largest[HEADS][QUERIES], total[HEADS][QUERIES];
    std::vector<float> values, copy;

    float* of(int64_t head, int64_t size) { return values.data() + head * QUERIES * size; }

    void start(int64_t heads, int64_t size) {
        values.assign(size_t(heads * QUERIES * size), 0.0f);
        std::fill(&largest[0][0], &largest[0][0] + HEADS * QUERIES, -std::numeric_limits<float>::infinity());
        std::fill(&total[0][0], &total[0][0] + HEADS * QUERIES, 0.0f);
    }
};

constexpr int PARTS = KEYS / WIDTH;

// The scores of one row in one block: its products with both tiles, scaled, capped and biased; hidden keys get minus
// infinity. `seen`: which keys of the block the row sees.
static inline void scores_of(const Context& c, const float* low, const float* high, int64_t head, int64_t first_key,
                             std::pair<int64_t, int64_t> seen, Vector (&scores)[PARTS]) {
    const Integers counting = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float factor = c.scale * c.cache_scale;
    for (int part = 0; part < PARTS; ++part) {
        const Integers index = counting + part * int(WIDTH);
        Vector v = load((part < PARTS / 2 ? low : high) + part % (PARTS / 2) * WIDTH) * factor;
        if (c.cap > 0.0f) v = c.cap - 2.0f * c.cap / (1.0f + exponential(2.0f / c.cap * v));
        if (c.slopes) v += c.slopes[head] * __builtin_convertvector(index + int(first_key), Vector);
        scores[part] = v;
        if (seen.first == 0 && seen.second == KEYS) continue;
        const Integers shown = (index >= int(seen.first)) & (index < int(seen.second));
        scores[part] = shown ? v : Vector() - std::numeric_limits<float>::infinity();
    }
}

// One row's probabilities in a block, before they are divided by their sum. Returns the factor that corrects what was
// summed before.
template <typename T>
static inline float probabilities(const Vector (&scores)[PARTS], float& largest, float& total, T* into) {
    Vector best = scores[0], sums = {};
    for (int part = 1; part < PARTS; ++part) best = best < scores[part] ? scores[part] : best;
    const float before = largest;
    largest = std::max(before, _mm512_reduce_max_ps((__m512)best));
    for (int part = 0; part < PARTS; ++part) {
        const Vector p = exponential(scores[part] - largest);
        put(into + part * WIDTH, p);
        sums += p;
    }
    const float correction = before == largest ? 1.0f : exponential(before - largest);
    total = total * correction + sum(sums);
    return correction;
}

// Query tokens of one head, `stride` apart, as a way to multiply takes them.
template <class Way>
struct Queries {
    const typename Way::Input* first;
    int64_t stride;
};

// Adds one block of keys to `rows` query tokens of one head, the first at `position`.
template <class Way>
static void add_block(const Context& c, int64_t head, int64_t position, int64_t rows, Queries<Way> queries,
                      int64_t key_block, const bfloat16* packed, float* largest, float* total, float* values) {
    alignas(64) float low[QUERIES * TILE], high[QUERIES * TILE];
    alignas(64) typename Way::Input weights[QUERIES * KEYS];
    float corrections[QUERIES];
    const int64_t first_key = key_block * KEYS;
    panel<Way>(queries.first, queries.stride, rows, packed, c.size, low);
    panel<Way>(queries.first, queries.stride, rows, packed + TILE * c.size, c.size, high);
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t from = std::max<int64_t>(0, c.first_seen(position + row) - first_key);
        const int64_t end = std::min(KEYS, position + row + 1 - first_key);
        corrections[row] = 1.0f;
        if (from >= end) {
            std::fill(weights + row * KEYS, weights + (row + 1) * KEYS, typename Way::Input());
            continue;
        }
        Vector scores[PARTS];
        scores_of(c, low + row * TILE, high + row * TILE, head, first_key, {from, end}, scores);
        corrections[row] = probabilities(scores, largest[row], total[row], weights + row * KEYS);
    }
    for (int64_t column = 0; column < c.size; column += TILE) {
        panel<Way>(weights, KEYS, rows, packed + (c.size + column) * KEYS, KEYS, low);
        for (int64_t row = 0; row < rows; ++row) {
            float* into = values + row * c.size + column;
            for (int64_t d = 0; d < TILE; d += WIDTH)
                put(into + d, load(into + d) * corrections[row] + load(low + row * TILE + d));
        }
    }
}

#if defined(__AVX512BF16__)
static Queries<Dots> queries_of(Dots, const bfloat16* from, int64_t stride, int64_t, int64_t, float*) {
    return {from, stride};
}
#endif

static Queries<MultiplyAdds> queries_of(MultiplyAdds, const bfloat16* from, int64_t stride, int64_t rows, int64_t size,
                                        float* into) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t d = 0; d < size; d += WIDTH) put(into + row * size + d, load(from + row * stride + d));
    return {into, size};
}

// Up to four of the query heads that share key and value head `kv`, for one block of queries.
template <class Way>
static void attend_block(Way way, const Context& c, int64_t kv, int64_t chunk, int64_t query_block, Running& running) {
    const int64_t group = c.heads / c.kv_heads, first = query_block * QUERIES, rows = std::min(QUERIES, c.count - first);
    const int64_t head = kv * group + chunk * HEADS, heads = std::min(HEADS, group - chunk * HEADS);
    const int64_t position = c.start + first, size = c.size;
    const amx::Session session(rows, Way::uses_tiles(rows, size));
    running.start(heads, size);
    running.copy.resize(std::is_same_v<Way, MultiplyAdds> ? size_t(HEADS * QUERIES * size) : 0);
    Queries<Way> queries[HEADS];
    for (int64_t h = 0; h < heads; ++h)
        queries[h] = queries_of(way, c.queries + first * c.stride + (head + h) * size, c.stride, rows, size,
                                running.copy.data() + h * QUERIES * size);
    for (int64_t b = c.first_seen(position) / KEYS; b * KEYS < position + rows; ++b)
        for (int64_t h = 0; h < heads; ++h)
            add_block<Way>(c, head + h, position, rows, queries[h], b, c.at(kv, b), running.largest[h],
                           running.total[h], running.of(h, size));
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t row = 0; row < rows; ++row) {
            const float* values = running.of(h, size) + row * size;
            bfloat16* out = c.out + ((first + row) * c.heads + head + h) * size;
            const float factor = c.cache_scale / running.total[h][row];
            for (int64_t d = 0; d < size; d += WIDTH) put(out + d, load(values + d) * factor);
        }
}

template <typename C>
static void attend_all(const Context& c) {
    const int64_t blocks = (c.count + QUERIES - 1) / QUERIES, chunks = (c.heads / c.kv_heads + HEADS - 1) / HEADS;
    const int64_t key_blocks = c.end_block() - c.first_block(), parts = c.kv_heads * chunks;
    team::run(true, [&](team::Member& member) {
        std::vector<bfloat16> rows(size_t(KEYS * c.size));
        Running running;
        member.each(c.kv_heads * key_blocks, [&](int64_t i) {
            pack<C>(c, i / key_blocks, c.first_block() + i % key_blocks, rows.data());
        });
        member.barrier();
        // The last queries see most keys: they come first, so that no thread is left alone with them.
        member.each_in_order(blocks * parts, [&](int64_t i) {
            const int64_t block = blocks - 1 - i / parts;
            by_fastest(std::min(QUERIES, c.count - block * QUERIES), c.size,
                       [&](auto way) { attend_block(way, c, i % parts / chunks, i % chunks, block, running); });
        });
    });
}

// out: (count, heads x size). `cache`: its storage type, as `bindings.CACHES` numbers them, other than float32.
EXPORT void context_attention(int64_t cache, const Context* c) {
    switch (cache) {
        case CACHE_BFLOAT16: return attend_all<bfloat16>(*c);
        case CACHE_INT8: return attend_all<int8_t>(*c);
        case CACHE_E4M3: return attend_all<e4m3>(*c);
    }
}

#endif
