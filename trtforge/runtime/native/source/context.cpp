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

constexpr int64_t KEYS = 64;         // of a block
constexpr int64_t QUERIES = 64;      // tokens of a block, and most rows of a panel
constexpr int64_t HEADS = 4;         // query heads that share a block of keys at once
constexpr int64_t MOST_SIZE = 256;   // of a head
constexpr int64_t LEAST_BLOCKS = 4;  // of keys, which are worth a thread's while

// table: block numbers; a token's slot holds 2 x `kv_heads` vectors of `size`, a multiple of 32: keys before values.
// queries: (count, heads or more, size), `stride` from token to token, at positions from `start` on. `packed`: memory
// for 2 x `kv_heads` x `size` numbers of all keys that are seen, rounded up to blocks at both ends; null where no more
// than QUERIES tokens see them. The rest as `Paged` in attention.cpp.
struct Context {
    const bfloat16* queries;
    const char* cache;
    bfloat16* out;
    const int64_t* table;
    const float* slopes;
    const float* sinks;
    bfloat16* packed;
    int64_t count, start, block, stride, heads, kv_heads, size, window, chunk;
    float scale, cap, cache_scale;

    int64_t first_by(int64_t position) const { return first_seen(position, window, chunk); }
    int64_t first_block() const { return first_by(start) / KEYS; }
    int64_t end_block() const { return (start + count + KEYS - 1) / KEYS; }

    // Query heads that share a key and value head, in chunks.
    int64_t chunks() const { return (heads / kv_heads + HEADS - 1) / HEADS; }

    // Where a block of one head's keys is packed; its values follow.
    bfloat16* at(int64_t kv, int64_t key_block) const {
        return packed + (kv * (end_block() - first_block()) + key_block - first_block()) * 2 * KEYS * size;
    }
};

// Where the keys of one head in one block are stored, and how far behind them their values, in bytes.
struct Slots {
    const char* keys[KEYS];
    int64_t count = 0, bytes = 0, values = 0;

    Slots() = default;
    Slots(const Context& c, int64_t width, int64_t kv, int64_t key_block)
        : count(std::min(KEYS, c.start + c.count - key_block * KEYS)), bytes(c.size * width),
          values(c.kv_heads * bytes) {
        for (int64_t i = 0; i < count;) {
            const int64_t token = key_block * KEYS + i, offset = token % c.block;
            const char* from = c.cache + (c.table[token / c.block] * c.block + offset) * 2 * values + kv * bytes;
            for (const int64_t end = std::min(count, i + c.block - offset); i < end; from += 2 * values) keys[i++] = from;
        }
    }

    // Fetches one of so many equal parts from memory.
    void fetch(int64_t part, int64_t parts) const {
        for (int64_t i = part * count / parts; i < (part + 1) * count / parts; ++i)
            for (int64_t at = 0; at < bytes; at += 64) {
                _mm_prefetch(keys[i] + at, _MM_HINT_T1);
                _mm_prefetch(keys[i] + values + at, _MM_HINT_T1);
            }
    }
};

// A stored vector as bfloat16: where it is, or in `into`.
static inline const bfloat16* expand(const bfloat16* from, int64_t, bfloat16*) { return from; }

template <typename C>
static inline const bfloat16* expand(const C* from, int64_t size, bfloat16* into) {
    for (int64_t i = 0; i < size; i += WIDTH) put(into + i, load(from + i));
    return into;
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

// KEYS keys to two tiles (size / 2, 32, 2).
static void pack_keys(const bfloat16* const* keys, int64_t size, bfloat16* into) {
    for (int64_t key = 0; key < KEYS; key += 16)
        for (int64_t column = 0; column < size; column += 32) {
            __m512i rows[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(keys[key + i] + column);
            transpose(rows);
            bfloat16* first = into + key / TILE * TILE * size + column * TILE + key % TILE * 2;
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(first + i * 2 * TILE, rows[i]);
        }
}

// KEYS values to size / 32 tiles (KEYS / 2, 32, 2).
static void pack_values(const bfloat16* const* values, int64_t size, bfloat16* into) {
    const __m512i front = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                           5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    for (int64_t column = 0; column < size; column += TILE)
        for (int64_t key = 0; key < KEYS; key += 2) {
            const __m512i even = _mm512_loadu_si512(values[key] + column);
            const __m512i odd = _mm512_loadu_si512(values[key + 1] + column);
            bfloat16* pairs = into + column * KEYS + key * TILE;
            _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(even, front, odd));
            _mm512_storeu_si512(pairs + TILE, _mm512_permutex2var_epi16(even, back, odd));
        }
}

// Packs the keys and then the values of one head in one block; those beyond the sequence are zero. `memory`: (KEYS,
// size).
template <typename C>
static void pack(const Slots& slots, int64_t size, bfloat16* memory, bfloat16* into) {
    alignas(64) static const bfloat16 zeros[MOST_SIZE] = {};
    const bfloat16* rows[KEYS];
    const auto collect = [&](int64_t behind) {
        for (int64_t i = 0; i < KEYS; ++i)
            rows[i] = i < slots.count ? expand((const C*)(slots.keys[i] + behind), size, memory + i * size) : zeros;
    };
    collect(0);
    pack_keys(rows, size, into);
    collect(slots.values);
    pack_values(rows, size, into + KEYS * size);
}

// How a type of cache is packed, and bytes of a stored number.
struct Stored {
    void (*pack)(const Slots&, int64_t size, bfloat16* memory, bfloat16* into);
    int64_t width;
};

// Query tokens from `first` on of up to four query heads that share key and value head `kv`.
struct Part {
    int64_t kv, head, heads, first, tokens;

    Part(const Context& c, int64_t index, int64_t query_block) {
        const int64_t group = c.heads / c.kv_heads, chunk = index % c.chunks();
        kv = index / c.chunks();
        head = kv * group + chunk * HEADS;
        heads = std::min(HEADS, group - chunk * HEADS);
        first = query_block * QUERIES;
        tokens = std::min(QUERIES, c.count - first);
    }
    int64_t joined() const { return std::clamp<int64_t>(QUERIES / tokens, 1, heads); }  // heads in a panel
    int64_t rows() const { return heads * tokens; }
};

// What a part has found so far: of every row, head after head, the largest score, the sum of probabilities, and the
// weighted values. `queries`: (rows, size), as a way to multiply takes them.
template <class Way>
struct Running {
    std::vector<float> largest, total, values;
    std::vector<typename Way::Input> queries;

    void start(const Context& c, const Part& p) {
        largest.assign(size_t(p.rows()), -std::numeric_limits<float>::infinity());
        total.assign(size_t(p.rows()), 0.0f);
        values.assign(size_t(p.rows() * c.size), 0.0f);
        queries.resize(size_t(p.rows() * c.size));
        for (int64_t row = 0; row < p.rows(); ++row) {
            const bfloat16* from = c.queries + (p.first + row % p.tokens) * c.stride + (p.head + row / p.tokens) * c.size;
            for (int64_t d = 0; d < c.size; d += WIDTH) put(queries.data() + row * c.size + d, load(from + d));
        }
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

// Adds one block of keys to a part's rows of `heads` heads from the part's `skipped` on. `next`: what is read next.
template <class Way>
static void add_block(const Context& c, const Part& p, int64_t skipped, int64_t heads, int64_t key_block,
                      const bfloat16* packed, const Slots& next, Running<Way>& running) {
    alignas(64) float low[QUERIES * TILE], high[QUERIES * TILE];
    alignas(64) typename Way::Input weights[QUERIES * KEYS];
    float corrections[QUERIES];
    const int64_t first_key = key_block * KEYS, before = skipped * p.tokens, rows = heads * p.tokens;
    const typename Way::Input* queries = running.queries.data() + before * c.size;
    panel<Way>(queries, c.size, rows, packed, c.size, low);
    panel<Way>(queries, c.size, rows, packed + TILE * c.size, c.size, high);
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t head = p.head + skipped + row / p.tokens, position = c.start + p.first + row % p.tokens;
        const int64_t from = std::max<int64_t>(0, c.first_by(position) - first_key);
        const int64_t end = std::min(KEYS, position + 1 - first_key);
        next.fetch(before + row, p.rows());
        corrections[row] = 1.0f;
        if (from >= end) {
            std::fill(weights + row * KEYS, weights + (row + 1) * KEYS, typename Way::Input());
            continue;
        }
        Vector scores[PARTS];
        scores_of(c, low + row * TILE, high + row * TILE, head, first_key, {from, end}, scores);
        corrections[row] = probabilities(scores, running.largest[size_t(before + row)],
                                         running.total[size_t(before + row)], weights + row * KEYS);
    }
    for (int64_t column = 0; column < c.size; column += TILE) {
        panel<Way>(weights, KEYS, rows, packed + (c.size + column) * KEYS, KEYS, low);
        for (int64_t row = 0; row < rows; ++row) {
            float* into = running.values.data() + (before + row) * c.size + column;
            for (int64_t d = 0; d < TILE; d += WIDTH)
                put(into + d, load(into + d) * corrections[row] + load(low + row * TILE + d));
        }
    }
}

// Attention of a part to the keys of blocks [first, end), which are packed here unless all are: in `memory`, (3, KEYS,
// size).
template <class Way>
static void attend(const Context& c, const Stored& stored, const Part& p, int64_t first, int64_t end, bfloat16* memory,
                   Running<Way>& running) {
    const int64_t joined = p.joined();
    const amx::Session session(joined * p.tokens, Way::uses_tiles(joined * p.tokens, c.size));
    bfloat16* own = memory + KEYS * c.size;
    Slots next;
    if (!c.packed) next = Slots(c, stored.width, p.kv, first);
    for (int64_t block = first; block < end; ++block) {
        if (!c.packed) {
            stored.pack(next, c.size, memory, own);
            next = block + 1 < end ? Slots(c, stored.width, p.kv, block + 1) : Slots();
        }
        for (int64_t h = 0; h < p.heads; h += joined)
            add_block(c, p, h, std::min(joined, p.heads - h), block, c.packed ? c.at(p.kv, block) : own, next, running);
    }
}

// Writes a part's output from what was found in `count` ranges of keys.
template <class Way>
static void finish(const Context& c, const Part& p, const Running<Way>* found, int64_t count) {
    for (int64_t row = 0; row < p.rows(); ++row) {
        float largest = found[0].largest[size_t(row)], total = 0.0f;
        for (int64_t i = 1; i < count; ++i) largest = std::max(largest, found[i].largest[size_t(row)]);
        const float* sink = c.sinks ? c.sinks + p.head + row / p.tokens : nullptr;
        if (sink) largest = std::max(largest, *sink);
        const auto factor = [&](int64_t i) { return exponential(found[i].largest[size_t(row)] - largest); };
        for (int64_t i = 0; i < count; ++i) total += found[i].total[size_t(row)] * factor(i);
        if (sink) total += exponential(*sink - largest);
        bfloat16* out = c.out + ((p.first + row % p.tokens) * c.heads + p.head + row / p.tokens) * c.size;
        for (int64_t d = 0; d < c.size; d += WIDTH) {
            Vector sum = {};
            for (int64_t i = 0; i < count; ++i) sum += load(found[i].values.data() + row * c.size + d) * factor(i);
            put(out + d, sum * (c.cache_scale / total));
        }
    }
}

// Few queries: keys are packed where they are used, and split into ranges where there are fewer heads than threads.
template <class Way>
static void attend_few(const Context& c, const Stored& stored) {
    const int64_t parts = c.kv_heads * c.chunks(), key_blocks = c.end_block() - c.first_block();
    const int64_t wanted = (2 * team::size() + parts - 1) / parts;
    const int64_t ranges = std::clamp<int64_t>(key_blocks / LEAST_BLOCKS, 1, wanted);
    std::vector<Running<Way>> found(size_t(parts * ranges));
    team::run(true, [&](team::Member& member) {
        std::vector<bfloat16> memory(size_t(3 * KEYS * c.size));
        member.each(parts * ranges, [&](int64_t i) {
            const Part part(c, i / ranges, 0);
            const int64_t range = i % ranges, before = c.first_block();
            found[size_t(i)].start(c, part);
            attend(c, stored, part, before + range * key_blocks / ranges, before + (range + 1) * key_blocks / ranges,
                   memory.data(), found[size_t(i)]);
        });
        member.barrier();
        member.each(parts, [&](int64_t i) { finish(c, Part(c, i, 0), &found[size_t(i * ranges)], ranges); });
    });
}

template <class Way>
static void attend_many(const Context& c, const Stored& stored) {
    const int64_t blocks = (c.count + QUERIES - 1) / QUERIES, parts = c.kv_heads * c.chunks();
    const int64_t key_blocks = c.end_block() - c.first_block();
    team::run(true, [&](team::Member& member) {
        std::vector<bfloat16> memory(size_t(KEYS * c.size));
        Running<Way> running;
        member.each(c.kv_heads * key_blocks, [&](int64_t i) {
            const int64_t kv = i / key_blocks, block = c.first_block() + i % key_blocks;
            stored.pack(Slots(c, stored.width, kv, block), c.size, memory.data(), c.at(kv, block));
        });
        member.barrier();
        // The last queries see most keys: they come first, so that no thread is left alone with them.
        member.each_in_order(blocks * parts, [&](int64_t i) {
            const Part part(c, i % parts, blocks - 1 - i / parts);
            const int64_t position = c.start + part.first, end = (position + part.tokens + KEYS - 1) / KEYS;
            running.start(c, part);
            attend(c, stored, part, c.first_by(position) / KEYS, end, memory.data(), running);
            finish(c, part, &running, 1);
        });
    });
}

// out: (count, heads x size). `cache`: its storage type, as `bindings.CACHES` numbers them, other than float32.
EXPORT void context_attention(int64_t cache, const Context* c) {
    const Stored stored = cache == CACHE_BFLOAT16 ? Stored{pack<bfloat16>, 2}
                          : cache == CACHE_INT8   ? Stored{pack<int8_t>, 1}
                                                  : Stored{pack<e4m3>, 1};
    const int64_t rows = std::min(QUERIES, c->count * std::min(HEADS, c->heads / c->kv_heads));
    by_fastest(rows, c->size, [&](auto way) {
        c->packed ? attend_many<decltype(way)>(*c, stored) : attend_few<decltype(way)>(*c, stored);
    });
}

#endif
