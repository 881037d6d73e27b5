// Paged attention: one query token a row, keys and values read from the blocks where they are.
//
// Algorithm: Kwon et al. 2023 (PagedAttention), with a row's scores kept whole in float32. Rows that are successive tokens
// of one long sequence are left to context attention, which reads its keys once.

#include "attention_floats.h"
#include "attention_pairs.h"
#include "context.h"
#include "team.h"

#include <limits>
#include <type_traits>

using attention::Floats;
using attention::Memory;
using attention::Paged;
using attention::Run;
using attention::Seen;

// Softmax of scores, whose number is a multiple of WIDTH, and of a sink, unless that is null, times `factor`.
static void normalise(float* scores, int64_t count, const float* sink, float factor) {
    Vector most = Vector() + (sink ? std::max(scores[0], *sink) : scores[0]), sums = {};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Vector v = load(scores + i);
        most = most < v ? v : most;
    }
    const float largest = largest_of(most);
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Vector p = exponential(load(scores + i) - largest);
        put(scores + i, p);
        sums += p;
    }
    const float scale = factor / (sum(sums) + (sink ? exponential(*sink - largest) : 0.0f));
    for (int64_t i = 0; i < count; i += WIDTH) put(scores + i, load(scores + i) * scale);
}

// tanh(x) = 1 - 2 / (1 + exp(2x))
static void cap_scores(float* scores, int64_t count, float cap) {
    for (int64_t i = 0; i < count; ++i) scores[i] = cap - 2.0f * cap / (1.0f + exponential(2.0f / cap * scores[i]));
}

// Softmax of a query head's scores (count,) of the tokens from `first` on, times the scale of the values. Those behind
// them, up to `pitch`, become zero.
static void soften(const Paged& p, int64_t head, int64_t first, int64_t count, int64_t pitch, float* scores) {
    if (p.cap > 0.0f) cap_scores(scores, count, p.cap);
    if (p.slopes)
        for (int64_t i = 0; i < count; ++i) scores[i] += p.slopes[head] * float(first + i);
    std::fill(scores + count, scores + pitch, std::numeric_limits<float>::lowest());
    normalise(scores, (count + WIDTH - 1) / WIDTH * WIDTH, p.sinks ? p.sinks + head : nullptr, p.cache_scale);
    std::fill(scores + count, scores + pitch, 0.0f);
}

// out (count x G, size): G query heads of each of `count` key and value heads, the first of all `head`. Keys of all heads
// are read token after token, which lie together, then values. `after`: the keys that are read next.
template <class Way, int G>
static void attend(const Paged& p, int64_t head, int64_t count, const typename Way::Number* given,
                   const Seen<typename Way::Cached>& keys, const typename Way::Cached* after, Memory& memory,
                   typename Way::Number* out) {
    using Tokens = Run<typename Way::Cached>;
    constexpr int64_t KEYS = Way::template KEYS<G>;
    const int64_t size = p.size, heads = count * G;
    const int64_t pitch = (keys.count() + 31) / 16 * 16;  // with room for the scores of KEYS keys after the last
    const typename Way::Query* queries = Way::queries(given, heads * size, memory);
    float *scores = at_least(memory.floats, heads * (pitch + size)), *sums = scores + heads * pitch;
    Seen<typename Way::Cached> values = keys;
    if (p.vectors > p.kv_heads) values.cache += p.kv_heads * size;
    keys.runs(values.begin(), [&](int64_t index, const Tokens& run) {
        for (int64_t token = 0; token < run.tokens; token += KEYS)
            for (int64_t kv = 0; kv < count; ++kv) {
                const Tokens own = run.from(kv * size);
                for (int64_t k = 0; k < KEYS; ++k) prefetch(own.ahead(token + k), size);
                Way::template score<G>(queries + kv * G * size, own.at(token), run.stride,
                                       std::min(KEYS, run.tokens - token), size, p.scale * p.cache_scale, pitch,
                                       scores + kv * G * pitch + index + token);
            }
    });
    for (int64_t h = 0; h < heads; ++h) soften(p, head + h, keys.first, keys.count(), pitch, scores + h * pitch);
    const typename Way::Weight* weights = Way::weights(scores, heads * pitch, memory);
    std::fill(sums, sums + heads * size, 0.0f);
    values.runs(after, [&](int64_t index, const Tokens& run) {
        for (int64_t kv = 0; kv < count; ++kv)
            Way::template weigh<G>(weights + kv * G * pitch + index, pitch, run.from(kv * size), size,
                                   sums + kv * G * size);
    });
    Way::put_all(sums, heads * size, out);
}

constexpr int64_t AT_ONCE = 4;  // query heads

// Tokens that rows of one sequence see, which are worth packing: tile registers multiply packed ones much faster.
template <typename T>
static int64_t least_together([[maybe_unused]] const Paged& p) {
#if defined(HAS_PRODUCTS)
    if (std::is_same_v<T, bfloat16> && amx::suits(p.size)) return 64;
#endif
    return 512;
}

static inline int64_t chunks(const Paged& p) { return (p.heads / p.kv_heads + AT_ONCE - 1) / AT_ONCE; }

template <typename C>
static inline Seen<C> seen_by(const Paged& p, int64_t row, int64_t kv) {
    const int64_t length = p.lengths[row], first = first_seen(length - 1, p.window, p.chunk);
    return {(const C*)p.cache + kv * p.size, p.tables + row * p.columns, first, length, p.block, p.vectors * p.size};
}

// Up to four of the query heads of each of `count` key and value heads from `kv` on, in one row.
template <class Way>
static void attend_chunk(const Paged& p, int64_t row, int64_t kv, int64_t count, int64_t chunk, Memory& memory) {
    using Number = typename Way::Number;
    using Cached = typename Way::Cached;
    const int64_t group = p.heads / p.kv_heads, head = kv * group + chunk * AT_ONCE;
    const Seen<Cached> keys = seen_by<Cached>(p, row, kv);
    const Number* queries = (const Number*)p.queries + row * p.stride + head * p.size;
    const Cached* after = seen_by<Cached>(p, std::min(row + 1, p.rows - 1), kv).begin();
    Number* out = (Number*)p.out + (row * p.heads + head) * p.size;
    switch (std::min(AT_ONCE, group - chunk * AT_ONCE)) {
        case 1: return attend<Way, 1>(p, head, count, queries, keys, after, memory, out);
        case 2: return attend<Way, 2>(p, head, count, queries, keys, after, memory, out);
        case 3: return attend<Way, 3>(p, head, count, queries, keys, after, memory, out);
        default: return attend<Way, 4>(p, head, count, queries, keys, after, memory, out);
    }
}

// With rows for all threads, a thread takes all heads of a row.
template <class Way>
static void attend_all(const Paged& p) {
    const bool whole = chunks(p) == 1 && p.rows >= 2 * team::size();
    const int64_t together = whole ? p.kv_heads : 1, parts = p.kv_heads / together * chunks(p);
    team::run(true, [&](team::Member& member) {
        static thread_local Memory memory;
        member.each(p.rows * parts, [&](int64_t i) {
            const int64_t kv = i % parts / chunks(p) * together;
            attend_chunk<Way>(p, i / parts, kv, together, i % chunks(p), memory);
        });
    });
}

template <typename T>
static void with_cache(const Paged& p, int64_t cache) {
#if defined(HAS_PRODUCTS)
    const bool pairs = std::is_same_v<T, bfloat16> && cache == CACHE_BFLOAT16 && p.size % attention::DEPTH == 0;
    if (pairs) return by_vectors([&](auto way) { attend_all<attention::Pairs<decltype(way)>>(p); });
#endif
    switch (cache) {
        case CACHE_FLOAT32: return attend_all<Floats<T, float>>(p);
        case CACHE_BFLOAT16: return attend_all<Floats<T, bfloat16>>(p);
        case CACHE_INT8: return attend_all<Floats<T, int8_t>>(p);
        case CACHE_E4M3: return attend_all<Floats<T, e4m3>>(p);
    }
}

// Some of the rows, whose queries are numbers of type T.
template <typename T>
static Paged rows_of(const Paged& p, int64_t first, int64_t rows) {
    Paged part = p;
    part.queries = (const T*)p.queries + first * p.stride;
    part.out = (T*)p.out + first * p.heads * p.size;
    part.tables += first * p.columns;
    part.lengths += first;
    part.rows = rows;
    return part;
}

// Rows from `row` on that are successive tokens of one sequence, as those of a prompt or of drafts are.
static int64_t of_one_sequence(const Paged& p, int64_t row) {
    const int64_t* table = p.tables + row * p.columns;
    int64_t end = row + 1;
    for (; end < std::min(p.rows, row + context::QUERIES) && p.lengths[end] == p.lengths[end - 1] + 1; ++end)
        if (!std::equal(table, table + (p.lengths[end] + p.block - 1) / p.block, p.tables + end * p.columns)) break;
    return end - row;
}

// Rows of one sequence.
static void attend_together(int64_t type, int64_t cache, const Paged& p) {
    const context::Context c = {p.queries, (const char*)p.cache, p.out, p.tables, p.slopes, p.sinks, nullptr,
                                p.rows, p.lengths[0] - 1, p.block, p.stride, p.heads, p.kv_heads, p.size, p.window,
                                p.chunk, p.scale, p.cap, p.cache_scale};
    context_attention(type, cache, &c);
}

// Rows together where they may be, the others between them by themselves.
template <typename T>
static void attend_rows(int64_t type, int64_t cache, const Paged& p) {
    const bool may_join = p.vectors == 2 * p.kv_heads && p.size % context::COLUMNS == 0 && p.size <= context::MOST_SIZE;
    int64_t first = 0;
    const auto attend_alone = [&](int64_t end) {
        if (first < end) with_cache<T>(rows_of<T>(p, first, end - first), cache);
    };
    for (int64_t row = 0, rows; row < p.rows; row += rows) {
        rows = may_join ? of_one_sequence(p, row) : 1;
        if (rows == 1 || seen_by<char>(p, row, 0).count() < least_together<T>(p)) continue;
        attend_alone(row);
        attend_together(type, cache, rows_of<T>(p, row, rows));
        first = row + rows;
    }
    attend_alone(p.rows);
}

// out: (rows, heads x size).
EXPORT void paged_attention(int64_t type, int64_t cache, const Paged* p) {
    if (type == FLOAT32)
        attend_rows<float>(type, cache, *p);
    else
        attend_rows<bfloat16>(type, cache, *p);
}
