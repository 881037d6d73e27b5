// Paged attention: one query token per row; keys and values are read in place from the KV blocks.
//
// Algorithm: Kwon et al. 2023 (PagedAttention). A thread computes all heads of a row, one chunk of tokens after another, so
// that memory is read in address order; with few rows, a thread computes a range of a row's tokens. Rows that are consecutive
// tokens of one long sequence are computed by context attention, which reads the sequence's keys once.

#include "attention_floats.h"
#include "attention_pairs.h"
#include "context.h"
#include "team.h"

#include <numeric>
#include <vector>

using attention::Fetch;
using attention::Floats;
using attention::Found;
using attention::Memory;
using attention::Paged;
using attention::Rows;
using attention::Run;
using attention::Seen;
using attention::Softmax;

// Soft cap: cap * tanh(score / cap) * LOG2_E, by tanh(x) = 1 - 2 / (1 + exp(2x)).
static void cap_scores(float* scores, int64_t count, float cap) {
    for (int64_t i = 0; i < count; ++i)
        scores[i] = LOG2_E * cap * (1.0f - 2.0f / (1.0f + exponential(2.0f / cap * scores[i])));
}

constexpr int64_t CHUNK = 64;             // maximum tokens whose scores are computed before their values are added
constexpr int64_t CHUNK_BYTES = 1 << 18;  // maximum bytes of their slots: two chunks must fit in the L2 cache
constexpr int64_t AT_ONCE = 4;            // query heads that are computed together
constexpr int64_t LEAST = 16;             // minimum tokens of a range, and size of the first chunk of a thread's part

template <typename C>
static inline Seen<C> seen_by(const Paged& p, int64_t row) {
    const int64_t length = p.lengths[row], first = first_seen(length - 1, p.window, p.chunk);
    return {(const C*)p.cache, p.tables + row * p.columns, first, length, p.block, p.vectors * p.size};
}

// Calls function(first, G) for the query heads that share a KV head, in parts of G heads.
template <class Function>
static inline void for_each_part(const Paged& p, Function function) {
    const int64_t group = p.heads / p.kv_heads;
    for (int64_t first = 0; first < group; first += AT_ONCE)
        with_constant<AT_ONCE>(group - first, [&](auto g) { function(first, g); });
}

// Attention of all heads of a row.
template <class Way>
class Row {
  public:
    using Cached = typename Way::Cached;

    Row(const Rows& p, int64_t row, Memory& memory, Found& found) : p_(p), memory_(memory), found_(found) {
        queries_ = Way::queries(p, row, memory);
        seen_ = p.sees_all(row) ? nullptr : p.seen + row;
        length_ = p.lengths[row];
        scores_ = at_least(memory.scores, p.heads * PITCH);
        scale_ = p.scale * p.cache_scale * (p.cap > 0.0f ? 1.0f : LOG2_E);
    }

    // Adds at most CHUNK tokens to the results, while `fetch` prefetches others.
    void add(const Seen<Cached>& tokens, Fetch<Cached>& fetch) {
        tokens.runs([&](int64_t index, const Run<Cached>& run) {
            for_each_part(p_, [&](int64_t first, auto g) { score<g()>(first, run, index, fetch); });
        });
        for (int64_t head = 0; head < p_.heads; ++head) {
            fetch.advance(attention::SOFTENING * tokens.count());
            soften(head, tokens.first, tokens.count());
        }
        const typename Way::Weight* weights = Way::weights(scores_, p_.heads * PITCH, memory_);
        tokens.runs([&](int64_t index, const Run<Cached>& run) {
            for_each_part(p_, [&](int64_t first, auto g) { weigh<g()>(first, run, weights + index, fetch); });
        });
    }

  private:
    static constexpr int64_t PITCH = CHUNK + 16;  // row stride of scores, with room for some keys after the last one

    int64_t head_of(int64_t kv, int64_t first) const { return kv * (p_.heads / p_.kv_heads) + first; }

    // Scores of G query heads of each KV head. Keys are read in memory order: all heads of a token, then the next token.
    template <int G>
    void score(int64_t first, const Run<Cached>& run, int64_t index, Fetch<Cached>& fetch) {
        constexpr int64_t KEYS = Way::template KEYS<G>;
        for (int64_t token = 0; token < run.tokens; token += KEYS)
            for (int64_t kv = 0; kv < p_.kv_heads; ++kv) {
                const int64_t head = head_of(kv, first);
                fetch.advance(attention::SCORING * KEYS * G);
                Way::template score<G>(queries_ + head * p_.size, run.from(kv * p_.size).at(token), run.stride,
                                       std::min(KEYS, run.tokens - token), p_.size, scale_, PITCH,
                                       scores_ + head * PITCH + index + token);
            }
    }

    // Softmax of a query head's scores for `count` tokens from `first` on. Later scores become zero.
    void soften(int64_t head, int64_t first, int64_t count) {
        float* scores = scores_ + head * PITCH;
        if (p_.cap > 0.0f) cap_scores(scores, count, p_.cap);
        if (p_.slopes)
            for (int64_t i = 0; i < count; ++i) scores[i] += LOG2_E * p_.slopes[head] * float(first + i);
        if (seen_) hide(scores, first, count);
        std::fill(scores + count, scores + PITCH, std::numeric_limits<float>::lowest());
        const float factor = found_.softmax[size_t(head)].add(scores, (count + WIDTH - 1) / WIDTH * WIDTH);
        std::fill(scores + count, scores + PITCH, 0.0f);
        if (factor == 1.0f) return;
        float* values = found_.values.data() + head * p_.size;
        for (int64_t i = 0; i < p_.size; i += WIDTH) put(values + i, load(values + i) * factor);
    }

    // Masks the scores of `count` tokens from `first` on that the row does not see.
    void hide(float* scores, int64_t first, int64_t count) const {
        for (int64_t i = std::max<int64_t>(0, length_ - 64 - first); i < count; ++i)
            if (!(*seen_ >> (63 - (length_ - 1 - first - i)) & 1)) scores[i] = std::numeric_limits<float>::lowest();
    }

    // Adds the weighted values for G query heads of each KV head.
    template <int G>
    void weigh(int64_t first, const Run<Cached>& run, const typename Way::Weight* weights, Fetch<Cached>& fetch) {
        const int64_t behind = p_.vectors > p_.kv_heads ? p_.kv_heads : 0;
        for (int64_t kv = 0; kv < p_.kv_heads; ++kv) {
            const int64_t head = head_of(kv, first);
            Way::template weigh<G>(weights + head * PITCH, PITCH, run.from((behind + kv) * p_.size),
                                   fetch.due(attention::ADDING * run.tokens * G, run.tokens), p_.size,
                                   found_.values.data() + head * p_.size);
        }
    }

    const Rows& p_;
    Memory& memory_;
    Found& found_;
    const typename Way::Query* queries_;
    float *scores_, scale_;
    const uint64_t* seen_;
    int64_t length_;
};

// Writes a head's output in a row from the partial results of `count` ranges of its tokens. Overwrites those of the first
// range with the sum.
template <class Way>
static void finish(const Rows& p, int64_t row, int64_t head, Found* found, int64_t count) {
    const auto softmax = [&](int64_t i) -> const Softmax& { return found[i].softmax[size_t(head)]; };
    const auto values = [&](int64_t i) { return found[i].values.data() + head * p.size; };
    const float sink = p.sinks ? LOG2_E * p.sinks[head] : std::numeric_limits<float>::lowest();
    float largest = sink;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, softmax(i).largest);
    float total = p.sinks ? power_of_negative(sink - largest) : 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float factor = power_of_negative(softmax(i).largest - largest);
        total += sum(softmax(i).sums) * factor;
        for (int64_t d = 0; d < p.size; d += WIDTH) {
            const Vector part = load(values(i) + d) * factor;
            put(values(0) + d, i == 0 ? part : load(values(0) + d) + part);
        }
    }
    for (int64_t d = 0; d < p.size; d += WIDTH) put(values(0) + d, load(values(0) + d) * (p.cache_scale / total));
    Way::put_all(p, values(0), (row * p.heads + head) * p.size);
}

// Splits the tokens of each row into equal ranges if there are too few rows to occupy all threads evenly.
struct Ranges {
    const Rows& p;
    int64_t each = 1;  // ranges per row

    explicit Ranges(const Rows& rows) : p(rows) {
        const int64_t threads = team::size();
        if (p.rows >= 2 * threads) return;
        int64_t most = 0;
        for (int64_t row = 0; row < p.rows; ++row) most = std::max(most, seen_by<char>(p, row).count());
        each = std::clamp<int64_t>(most / LEAST, 1, threads / std::gcd(p.rows, threads));
    }

    int64_t count() const { return p.rows * each; }

    template <typename C>
    Seen<C> at(int64_t index) const {
        const Seen<C> seen = seen_by<C>(p, index / each);
        const auto before = [&](int64_t range) { return range * seen.count() / each; };
        const int64_t range = index % each;
        return seen.part(seen.first + before(range), before(range + 1) - before(range));
    }
};

// Attention of a row to one range of its tokens. `first`: the range is the first in a thread's part, even if another thread
// computes it, so that results do not depend on the thread. `begins`: this thread has not prefetched anything yet. `next`:
// the range that it computes after this one, or -1.
template <class Way>
static void attend_range(const Ranges& ranges, int64_t index, bool first, bool begins, int64_t next, Memory& memory,
                         Found& found) {
    using Cached = typename Way::Cached;
    using Tokens = Seen<Cached>;
    const Rows& p = ranges.p;
    const Tokens tokens = ranges.at<Cached>(index);
    const Tokens after = next < 0 ? tokens.part(tokens.length, 0) : ranges.at<Cached>(next);
    const int64_t chunk = std::clamp(CHUNK_BYTES / int64_t(tokens.pitch * sizeof(Cached)) / LEAST * LEAST, LEAST, CHUNK);
    Tokens now = tokens.part(tokens.first, first ? LEAST : chunk);
    if (begins) Fetch<Cached>(now, 1).advance(attention::WHOLE);
    found.start(p.heads, p.size);
    Row<Way> row(p, index / ranges.each, memory, found);
    while (now.count() > 0) {
        const Tokens rest = tokens.part(now.length, chunk);
        Fetch<Cached> fetch(rest.count() > 0 ? rest : after.part(after.first, chunk), now.count() * p.heads);
        row.add(now, fetch);
        now = rest;
    }
}

template <class Way>
static void attend_all(const Rows& p) {
    static thread_local std::vector<Found> of_ranges;
    const Ranges ranges(p);
    if (ranges.each > 1 && int64_t(of_ranges.size()) < ranges.count()) of_ranges.resize(size_t(ranges.count()));
    Found* const found = of_ranges.data();
    team::run(true, [&](team::Member& member) {
        static thread_local Memory memory;
        const int64_t end = member.first_of(member.thread + 1, ranges.count());
        bool begins = true;
        member.each(ranges.count(), [&](int64_t i) {
            Found& own = ranges.each > 1 ? found[i] : memory.found;
            const bool first = i == member.first_of(member.part_of(i, ranges.count()), ranges.count());
            attend_range<Way>(ranges, i, first, begins, i + 1 < end ? i + 1 : -1, memory, own);
            begins = false;
            if (ranges.each > 1) return;
            for (int64_t head = 0; head < p.heads; ++head) finish<Way>(p, i, head, &own, 1);
        });
        if (ranges.each == 1) return;
        member.barrier();
        member.each(p.rows * p.heads, [&](int64_t i) {
            const int64_t row = i / p.heads;
            finish<Way>(p, row, i % p.heads, found + row * ranges.each, ranges.each);
        });
    });
}

// Minimum context from which packing keys and values for rows of one sequence pays off: AMX multiplies packed tiles much
// faster.
static int64_t least_together([[maybe_unused]] const Rows& p) {
#if defined(HAS_PRODUCTS)
    if (p.type == BFLOAT16 && amx::suits(p.size)) return 64;
#endif
    return 512;
}

static void with_cache(const Rows& p, int64_t cache) {
#if defined(HAS_PRODUCTS)
    const bool pairs = p.type == BFLOAT16 && cache == CACHE_BFLOAT16 && p.size % attention::DEPTH == 0;
    if (pairs) return by_vectors([&](auto way) { attend_all<attention::Pairs<decltype(way)>>(p); });
#endif
    switch (cache) {
        case CACHE_FLOAT32: return attend_all<Floats<float>>(p);
        case CACHE_BFLOAT16: return attend_all<Floats<bfloat16>>(p);
        case CACHE_INT8: return attend_all<Floats<int8_t>>(p);
        case CACHE_E4M3: return attend_all<Floats<e4m3>>(p);
    }
}

// Rows [first, first + rows).
static Rows part_of(const Rows& p, int64_t first, int64_t rows) {
    Rows part = p;
    part.queries = (const char*)p.queries + first * p.stride * p.width();
    part.out = (char*)p.out + first * p.heads * p.size * p.width();
    part.tables += first * p.columns;
    part.lengths += first;
    if (part.seen) part.seen += first;
    part.rows = rows;
    return part;
}

// Number of rows from `row` on that are consecutive tokens of one sequence, like those of a prompt or of drafts.
static int64_t of_one_sequence(const Rows& p, int64_t row) {
    const int64_t* table = p.tables + row * p.columns;
    int64_t end = row + 1;
    if (!p.sees_all(row)) return 1;
    for (; end < std::min(p.rows, row + context::QUERIES) && p.lengths[end] == p.lengths[end - 1] + 1; ++end)
        if (!p.sees_all(end) ||
            !std::equal(table, table + (p.lengths[end] + p.block - 1) / p.block, p.tables + end * p.columns))
            break;
    return end - row;
}

// Attention of rows that are consecutive tokens of one sequence.
static void attend_together(const Rows& p, int64_t cache) {
    const context::Context c = {p.queries, (const char*)p.cache, p.out, p.tables, p.slopes, p.sinks, nullptr,
                                p.rows, p.lengths[0] - 1, p.block, p.stride, p.heads, p.kv_heads, p.size, p.window,
                                p.chunk, p.scale, p.cap, p.cache_scale};
    context_attention(p.type, cache, &c);
}

// Computes consecutive rows of one sequence together where possible, and all other rows alone.
static void attend_rows(const Rows& p, int64_t cache) {
    const bool may_join = p.vectors == 2 * p.kv_heads && p.size % context::COLUMNS == 0 && p.size <= context::MOST_SIZE;
    int64_t first = 0;
    const auto attend_alone = [&](int64_t end) {
        if (first < end) with_cache(part_of(p, first, end - first), cache);
    };
    for (int64_t row = 0, rows; row < p.rows; row += rows) {
        rows = may_join ? of_one_sequence(p, row) : 1;
        if (rows == 1 || seen_by<char>(p, row).count() < least_together(p)) continue;
        attend_alone(row);
        attend_together(part_of(p, row, rows), cache);
        first = row + rows;
    }
    attend_alone(p.rows);
}

// out: (rows, heads x size).
EXPORT void paged_attention(int64_t type, int64_t cache, const Paged* p) {
    attend_rows({*p, type}, cache);
}
