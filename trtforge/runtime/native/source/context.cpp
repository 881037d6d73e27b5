// Context attention: many query tokens of one sequence; keys and values are read in place from the KV blocks.
//
// Algorithm: Dao 2023 (FlashAttention-2): keys are processed in blocks, with a running maximum and sum for each row's
// softmax. Queries times keys and probabilities times values are products with packed tiles: a block of keys has two tiles of
// 32 keys, then a tile for every 32 elements of a value. `Way`, the way to multiply, is `Pairs` or `Floats`.

#include "context.h"
#include "context_floats.h"
#include "context_pairs.h"
#include "team.h"

#include <limits>
#include <utility>
#include <vector>

using namespace context;

constexpr int64_t LEAST_BLOCKS = 4;  // minimum blocks of keys in a range

// The packing function for a type of cache, and `width`, the bytes of a cache element.
template <class Way>
struct Stored {
    void (*pack)(const Slots&, const Slots& next, int64_t size, typename Way::Packed* memory,
                 typename Way::Packed* into);
    int64_t width;
};

// A block of query tokens from `first` on, for up to four query heads that share KV head `kv`.
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
    int64_t joined() const { return std::clamp<int64_t>(QUERIES / tokens, 1, heads); }  // heads that share a panel
    int64_t rows() const { return heads * tokens; }
};

// Running results of a part: for each row, head by head, the largest score, the sum of probabilities, and the weighted values.
// `queries`: (rows, size), in the type that `Way` reads.
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
            const auto* from = (const typename Way::Number*)c.queries + (p.first + row % p.tokens) * c.stride + (p.head + row / p.tokens) * c.size;
            for (int64_t d = 0; d < c.size; d += WIDTH) put(queries.data() + row * c.size + d, load(from + d));
        }
    }
};

constexpr int PARTS = KEYS / WIDTH;

// The scores of one row in one block, times LOG2_E: the products with both tiles, scaled, capped and biased; masked keys get
// minus infinity. `seen`: [first, end) of the block's keys that the row sees.
static inline void scores_of(const Context& c, const float* low, const float* high, int64_t head, int64_t first_key,
                             std::pair<int64_t, int64_t> seen, Vector (&scores)[PARTS]) {
    Integers counting;
    for (int i = 0; i < int(WIDTH); ++i) counting[i] = i;
    const float factor = c.scale * c.cache_scale * (c.cap > 0.0f ? 1.0f : LOG2_E);
    for (int part = 0; part < PARTS; ++part) {
        const Integers index = counting + part * int(WIDTH);
        Vector v = load((part < PARTS / 2 ? low : high) + part % (PARTS / 2) * WIDTH) * factor;
        if (c.cap > 0.0f) v = LOG2_E * c.cap * (1.0f - 2.0f / (1.0f + exponential(2.0f / c.cap * v)));
        if (c.slopes) v += LOG2_E * c.slopes[head] * __builtin_convertvector(index + int(first_key), Vector);
        scores[part] = v;
        if (seen.first == 0 && seen.second == KEYS) continue;
        const Integers shown = (index >= int(seen.first)) & (index < int(seen.second));
        scores[part] = shown ? v : Vector() - std::numeric_limits<float>::infinity();
    }
}

// One row's unnormalised probabilities in a block. Returns the factor that corrects earlier sums for the new maximum.
template <typename T>
static inline float probabilities(const Vector (&scores)[PARTS], float& largest, float& total, T* into) {
    Vector best = scores[0], sums = {};
    for (int part = 1; part < PARTS; ++part) best = best < scores[part] ? scores[part] : best;
    const float before = largest;
    largest = std::max(before, largest_of(best));
    for (int part = 0; part < PARTS; ++part) {
        const Vector p = power_of_negative(scores[part] - largest);
        put(into + part * WIDTH, p);
        sums += p;
    }
    const float correction = before == largest ? 1.0f : power_of_negative(before - largest);
    total = total * correction + sum(sums);
    return correction;
}

// Adds one block of keys to the results of `heads` of a part's heads, from its head `skipped` on.
template <class Way>
static void add_block(const Context& c, const Part& p, int64_t skipped, int64_t heads, int64_t key_block,
                      const typename Way::Packed* packed, Running<Way>& running) {
    alignas(64) float low[QUERIES * COLUMNS], high[QUERIES * COLUMNS];
    alignas(64) typename Way::Input weights[QUERIES * KEYS];
    float corrections[QUERIES];
    const int64_t first_key = key_block * KEYS, before = skipped * p.tokens, rows = heads * p.tokens;
    const typename Way::Input* queries = running.queries.data() + before * c.size;
    Way::multiply(queries, c.size, rows, packed, c.size, low);
    Way::multiply(queries, c.size, rows, packed + COLUMNS * c.size, c.size, high);
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t head = p.head + skipped + row / p.tokens, position = c.start + p.first + row % p.tokens;
        const int64_t from = std::max<int64_t>(0, c.first_by(position) - first_key);
        const int64_t end = std::min(KEYS, position + 1 - first_key);
        corrections[row] = 1.0f;
        if (from >= end) {
            std::fill(weights + row * KEYS, weights + (row + 1) * KEYS, typename Way::Input());
            continue;
        }
        Vector scores[PARTS];
        scores_of(c, low + row * COLUMNS, high + row * COLUMNS, head, first_key, {from, end}, scores);
        corrections[row] = probabilities(scores, running.largest[size_t(before + row)],
                                         running.total[size_t(before + row)], weights + row * KEYS);
    }
    for (int64_t column = 0; column < c.size; column += COLUMNS) {
        Way::multiply(weights, KEYS, rows, packed + (c.size + column) * KEYS, KEYS, low);
        for (int64_t row = 0; row < rows; ++row) {
            float* into = running.values.data() + (before + row) * c.size + column;
            for (int64_t d = 0; d < COLUMNS; d += WIDTH)
                put(into + d, load(into + d) * corrections[row] + load(low + row * COLUMNS + d));
        }
    }
}

// Attention of a part to the keys of blocks [first, end). Unless all keys are packed already, it packs them in `memory`, (3,
// KEYS, size).
template <class Way>
static void attend(const Context& c, const Stored<Way>& stored, const Part& p, int64_t first, int64_t end,
                   typename Way::Packed* memory, Running<Way>& running) {
    using Packed = typename Way::Packed;
    const int64_t joined = p.joined();
    [[maybe_unused]] const auto session = Way::session(joined * p.tokens, c.size);
    Packed* own = memory + KEYS * c.size;
    Slots next;
    if (!c.packed) next = Slots(c, stored.width, p.kv, first);
    for (int64_t block = first; block < end; ++block) {
        if (!c.packed) {
            const Slots slots = next;
            next = block + 1 < end ? Slots(c, stored.width, p.kv, block + 1) : Slots();
            stored.pack(slots, next, c.size, memory, own);
        }
        const Packed* packed = c.packed ? c.at<Packed>(p.kv, block) : own;
        for (int64_t h = 0; h < p.heads; h += joined)
            add_block(c, p, h, std::min(joined, p.heads - h), block, packed, running);
    }
}

// Writes a part's output from the results of `count` ranges of keys.
template <class Way>
static void finish(const Context& c, const Part& p, const Running<Way>* found, int64_t count) {
    for (int64_t row = 0; row < p.rows(); ++row) {
        float largest = found[0].largest[size_t(row)], total = 0.0f;
        for (int64_t i = 1; i < count; ++i) largest = std::max(largest, found[i].largest[size_t(row)]);
        constexpr float none = -std::numeric_limits<float>::infinity();
        const float sink = c.sinks ? LOG2_E * c.sinks[p.head + row / p.tokens] : none;
        largest = std::max(largest, sink);
        const auto factor = [&](int64_t i) { return power_of_negative(found[i].largest[size_t(row)] - largest); };
        for (int64_t i = 0; i < count; ++i) total += found[i].total[size_t(row)] * factor(i);
        if (c.sinks) total += power_of_negative(sink - largest);
        auto* out = (typename Way::Number*)c.out + ((p.first + row % p.tokens) * c.heads + p.head + row / p.tokens) * c.size;
        for (int64_t d = 0; d < c.size; d += WIDTH) {
            Vector sum = {};
            for (int64_t i = 0; i < count; ++i) sum += load(found[i].values.data() + row * c.size + d) * factor(i);
            put(out + d, sum * (c.cache_scale / total));
        }
    }
}

// Few queries: each part packs its own keys. Keys are split into ranges if there are too few heads to occupy the threads.
template <class Way>
static void attend_few(const Context& c, const Stored<Way>& stored) {
    const int64_t parts = c.kv_heads * c.chunks(), key_blocks = c.end_block() - c.first_block();
    const int64_t wanted = (2 * team::size() + parts - 1) / parts;
    const int64_t ranges = std::clamp<int64_t>(key_blocks / LEAST_BLOCKS, 1, wanted);
    std::vector<Running<Way>> found(size_t(parts * ranges));
    team::run(true, [&](team::Member& member) {
        std::vector<typename Way::Packed> memory(size_t(3 * KEYS * c.size));
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
static void attend_many(const Context& c, const Stored<Way>& stored) {
    const int64_t blocks = (c.count + QUERIES - 1) / QUERIES, parts = c.kv_heads * c.chunks();
    const int64_t key_blocks = c.end_block() - c.first_block();
    team::run(true, [&](team::Member& member) {
        std::vector<typename Way::Packed> memory(size_t(KEYS * c.size));
        Running<Way> running;
        member.each(c.kv_heads * key_blocks, [&](int64_t i) {
            const int64_t kv = i / key_blocks, block = c.first_block() + i % key_blocks;
            stored.pack(Slots(c, stored.width, kv, block), Slots(), c.size, memory.data(),
                        c.at<typename Way::Packed>(kv, block));
        });
        member.barrier();
        // The last queries see the most keys. They are computed first, so that no thread is left working on them alone.
        member.each_in_order(blocks * parts, [&](int64_t i) {
            const Part part(c, i % parts, blocks - 1 - i / parts);
            const int64_t position = c.start + part.first, end = (position + part.tokens + KEYS - 1) / KEYS;
            running.start(c, part);
            attend(c, stored, part, c.first_by(position) / KEYS, end, memory.data(), running);
            finish(c, part, &running, 1);
        });
    });
}

template <class Way>
static void attend_context(const Context& c, const Stored<Way>& stored) {
    c.packed ? attend_many<Way>(c, stored) : attend_few<Way>(c, stored);
}

template <class Way>
static void with_cache(const Context& c, int64_t cache) {
    switch (cache) {
        case CACHE_FLOAT32: return attend_context<Way>(c, {Way::template pack<float>, 4});
        case CACHE_BFLOAT16: return attend_context<Way>(c, {Way::template pack<bfloat16>, 2});
        case CACHE_INT8: return attend_context<Way>(c, {Way::template pack<int8_t>, 1});
        case CACHE_E4M3: return attend_context<Way>(c, {Way::template pack<e4m3>, 1});
    }
}

// out: (count, heads x size), in the type of the queries. `packed` is float32 if the queries are float32 or bfloat16 products
// are not available.
EXPORT void context_attention(int64_t type, int64_t cache, const Context* c) {
    if (type == FLOAT32) return with_cache<Floats<float>>(*c, cache);
#if defined(HAS_PRODUCTS)
    const int64_t rows = std::min(QUERIES, c->count * std::min(HEADS, c->heads / c->kv_heads));
    by_fastest(rows, c->size, [&](auto way) { with_cache<Pairs<decltype(way)>>(*c, cache); });
#else
    with_cache<Floats<bfloat16>>(*c, cache);
#endif
}
