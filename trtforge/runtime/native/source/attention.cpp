// Paged attention: one query token a row, keys and values read from the blocks where they are.
//
// Algorithm: Kwon et al. 2023 (PagedAttention), with a row's scores kept whole in float32.

#include "scores.h"
#include "team.h"
#include "vectors.h"

#include <type_traits>
#include <vector>

// tables: (rows, columns) block numbers; lengths: tokens of each row, its own included. A token's slot holds `vectors`
// vectors of `size`, a multiple of 16: keys before values, or one that is both. `stride`: from row to row of queries.
// `window`: tokens that a query sees, 0 for all; with `chunk`, those of its own chunk of so many. `cap`: scores become
// cap * tanh(score / cap), 0 for none. `slopes`: ALiBi's, one a query head, or null. `sinks`: logits that the softmax
// counts beside the scores, one a query head, or null. Keys and values are the stored numbers times `cache_scale`.
struct Paged {
    const void* queries;
    const void* cache;
    void* out;
    const int64_t* tables;
    const int64_t* lengths;
    const float* slopes;
    const float* sinks;
    int64_t rows, columns, block, vectors, stride, heads, kv_heads, size, window, chunk;
    float scale, cap, cache_scale;
};

// The tokens that one row sees, [first, length), of one key and value head.
template <typename C>
struct Seen {
    const C* cache;
    const int64_t* table;
    int64_t first, length, block, pitch;  // pitch: from slot to slot

    int64_t count() const { return length - first; }

    // The vector of the first token.
    const C* begin() const { return cache + (table[first / block] * block + first % block) * pitch; }

    // Calls function(index of the first token, its vector, how many tokens lie contiguously from there, where those lie
    // that are read next). `after`: what is read after the last token.
    template <typename Function>
    void runs(const C* after, Function function) const {
        for (int64_t at = first; at < length;) {
            const int64_t offset = at % block, tokens = std::min(block - offset, length - at);
            const C* from = cache + (table[at / block] * block + offset) * pitch;
            at += tokens;
            const C* next = at < length ? cache + table[at / block] * block * pitch : after;
            function(at - tokens - first, from, tokens, next);
        }
    }
};

constexpr int64_t AHEAD = 8;  // tokens; a slot is wider than what the processor prefetches by itself

// Fetches `count` numbers into the second-level cache, which waits for more lines at once than the first; they need not
// exist.
template <typename C>
static inline void prefetch(const C* from, int64_t count) {
    const char* bytes = (const char*)from;
    for (int64_t at = 0; at < count * int64_t(sizeof(C)); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// Sums that are in registers and added up together, and vectors of a value whose sums are.
#if defined(__AVX512F__)
constexpr int SUMS = 16, VALUES = 4;
#elif defined(__AVX__)
constexpr int SUMS = 8, VALUES = 2;
#else
constexpr int SUMS = 4, VALUES = 2;
#endif

// scores (G, seen tokens) = queries (G, size) times keys.
template <int G, typename C>
static void score(const float* queries, const Seen<C>& keys, int64_t size, float* scores) {
    constexpr int K = SUMS / G;
    const int64_t count = keys.count();
    keys.runs(nullptr, [&](int64_t index, const C* key, int64_t tokens, const C*) {
        for (int64_t token = 0; token < tokens; token += K, key += K * keys.pitch) {
            const int64_t last = std::min<int64_t>(K, tokens - token) - 1;
            const C* of[K];
            for (int k = 0; k < K; ++k) {
                of[k] = key + std::min<int64_t>(k, last) * keys.pitch;
                prefetch(of[k] + AHEAD * keys.pitch, size);
            }
            Vector sums[SUMS] = {};
            for (int64_t d = 0; d < size; d += WIDTH) {
#pragma GCC unroll 16
                for (int k = 0; k < K; ++k) {
                    const Vector part = load(of[k] + d);
#pragma GCC unroll 4
                    for (int g = 0; g < G; ++g) sums[k * G + g] += load(queries + g * size + d) * part;
                }
            }
            const Vector totals = sums_of(sums);
            for (int64_t k = 0; k <= last; ++k)
                for (int64_t g = 0; g < G; ++g) scores[g * count + index + token + k] = totals[k * G + g];
        }
    });
}

// out (G, W vectors of a value, `size` apart) = scores (G, seen tokens) times values.
template <int G, int W, typename C>
static void weigh(const float* scores, const Seen<C>& values, int64_t size, float* out) {
    const int64_t count = values.count();
    Vector sums[G][W] = {};
    values.runs(nullptr, [&](int64_t index, const C* value, int64_t tokens, const C*) {
        for (int64_t token = 0; token < tokens; ++token, value += values.pitch) {
            prefetch(value + AHEAD * values.pitch, W * WIDTH);
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) {
                const Vector part = load(value + w * WIDTH);
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g) sums[g][w] += scores[g * count + index + token] * part;
            }
        }
    });
    for (int g = 0; g < G; ++g)
        for (int w = 0; w < W; ++w) *(Vector*)(out + g * size + w * WIDTH) = sums[g][w];
}

// Softmax of a head's scores and of its sink, unless that is null, times `factor`.
static void normalise(float* scores, int64_t count, const float* sink, float factor) {
    const int64_t whole = count / WIDTH * WIDTH;
    float largest = sink ? std::max(scores[0], *sink) : scores[0], total = 0.0f;
    Vector most = Vector() + largest, sums = {};
    for (int64_t i = 0; i < whole; i += WIDTH) {
        const Vector v = load(scores + i);
        most = most < v ? v : most;
    }
    largest = std::max(largest, largest_of(most));
    for (int64_t i = whole; i < count; ++i) largest = std::max(largest, scores[i]);
    for (int64_t i = 0; i < whole; i += WIDTH) {
        const Vector p = exponential(load(scores + i) - largest);
        put(scores + i, p);
        sums += p;
    }
    for (int64_t i = whole; i < count; ++i) total += scores[i] = exponential(scores[i] - largest);
    if (sink) total += exponential(*sink - largest);
    const float scale = factor / (total + sum(sums));
    for (int64_t i = 0; i < whole; i += WIDTH) put(scores + i, load(scores + i) * scale);
    for (int64_t i = whole; i < count; ++i) scores[i] *= scale;
}

// tanh(x) = 1 - 2 / (1 + exp(2x))
static void cap_scores(float* scores, int64_t count, float cap) {
    for (int64_t i = 0; i < count; ++i) scores[i] = cap - 2.0f * cap / (1.0f + exponential(2.0f / cap * scores[i]));
}

// Softmax of a query head's scores (count,) of the tokens from `first` on, times the scale of the values.
static void soften(const Paged& p, int64_t head, int64_t first, int64_t count, float* scores) {
    if (p.cap > 0.0f) cap_scores(scores, count, p.cap);
    if (p.slopes)
        for (int64_t i = 0; i < count; ++i) scores[i] += p.slopes[head] * float(first + i);
    normalise(scores, count, p.sinks ? p.sinks + head : nullptr, p.cache_scale);
}

// The memory of one thread: grows, and is not cleared.
struct Memory {
    std::vector<float> floats;
    std::vector<bfloat16> halves;

    float* need_floats(int64_t count) { return need(floats, count); }
    bfloat16* need_halves(int64_t count) { return need(halves, count); }

  private:
    template <typename T>
    static T* need(std::vector<T>& memory, int64_t count) {
        if (int64_t(memory.size()) < count) memory.resize(size_t(count));
        return memory.data();
    }
};

// out (G, size): G query heads from `head` on, which share one key and value head.
template <int G, typename T, typename C>
static void attend(const Paged& p, int64_t head, const T* given, Seen<C> keys, Memory& memory, float* out) {
    const int64_t count = keys.count(), size = p.size, kv_heads = p.kv_heads;
    float *queries = memory.need_floats(G * (size + count)), *scores = queries + G * size;
    for (int64_t i = 0; i < G * size; ++i) queries[i] = to_float(given[i]) * p.scale * p.cache_scale;
    score<G>(queries, keys, size, scores);
    for (int g = 0; g < G; ++g) soften(p, head + g, keys.first, count, scores + g * count);
    Seen<C> values = keys;
    if (p.vectors > kv_heads) values.cache += kv_heads * size;
    int64_t d = 0;
    if (VALUES == 4)
        for (; d + 4 * WIDTH <= size; d += 4 * WIDTH, values.cache += 4 * WIDTH)
            weigh<G, 4>(scores, values, size, out + d);
    for (; d + 2 * WIDTH <= size; d += 2 * WIDTH, values.cache += 2 * WIDTH) weigh<G, 2>(scores, values, size, out + d);
    for (; d < size; d += WIDTH, values.cache += WIDTH) weigh<G, 1>(scores, values, size, out + d);
}

#if defined(HAS_PRODUCTS)

// The tokens of a run, `stride` apart, and those that are read after it: `ahead(i)` is read `DISTANCE` tokens after i.
struct Run {
    static constexpr int64_t DISTANCE = 16;
    const bfloat16* first;
    int64_t tokens, stride;
    const bfloat16* next;

    const bfloat16* ahead(int64_t token) const {
        const int64_t at = token + DISTANCE;
        return at < tokens ? first + at * stride : next + (at - tokens) * stride;
    }
};

// Adds to sums (G, `size` apart), 32 W of a value in the order of `add_values`, the weights (G, `pitch` apart) times the
// values of a run, from number `d` on.
template <class Way, int G, int W>
static void weigh_run(const typename Way::Input* weights, int64_t pitch, const Run& run, int64_t d, int64_t size,
                      float* into) {
    __m512 sums[G][2 * W];
    for (int g = 0; g < G; ++g)
        for (int half = 0; half < 2 * W; ++half) sums[g][half] = _mm512_loadu_ps(into + g * size + half * WIDTH);
    for (int64_t token = 0; token < run.tokens; token += 2) {
        const bfloat16* value = run.first + token * run.stride + d;
        prefetch(run.ahead(token) + d, W * pairwise::DEPTH);
        prefetch(run.ahead(token + 1) + d, W * pairwise::DEPTH);
        const bfloat16* second = token + 1 < run.tokens ? value + run.stride : nullptr;
        pairwise::add_values<G, W>(Way(), weights + token, pitch, value, second, sums);
    }
    for (int g = 0; g < G; ++g)
        for (int half = 0; half < 2 * W; ++half) _mm512_storeu_ps(into + g * size + half * WIDTH, sums[g][half]);
}

// The probabilities as ways to multiply take them: in float32, and rounded to bfloat16 (Dao et al. 2022).
static inline const float* weights_of(MultiplyAdds, const float* scores, int64_t, Memory&) { return scores; }

#if defined(__AVX512BF16__)
static inline const bfloat16* weights_of(Dots, const float* scores, int64_t count, Memory& memory) {
    bfloat16* weights = memory.need_halves(count + 1);
    pairwise::round_weights(scores, count, weights);
    weights[count] = {};
    return weights;
}
#endif

// out (count x G, size): G query heads of each of `count` key and value heads, the first of all `head`. Sizes are
// multiples of 32. Keys of all heads are read token after token, which lie together, then values. `after`: the keys that
// are read next.
template <class Way, int G>
static void attend_pairs(const Paged& p, int64_t head, int64_t count, const bfloat16* queries, Seen<bfloat16> keys,
                         const bfloat16* after, Memory& memory, bfloat16* out) {
    const int64_t seen = (keys.count() + 15) / 16 * 16, size = p.size, heads = count * G;
    float *scores = memory.need_floats(heads * (seen + size)), *sums = scores + heads * seen;
    Seen<bfloat16> values = keys;
    if (p.vectors > p.kv_heads) values.cache += p.kv_heads * size;
    keys.runs(values.begin(), [&](int64_t index, const bfloat16* key, int64_t tokens, const bfloat16* next) {
        constexpr int64_t K = 16 / G;
        const Run run{key, tokens, keys.pitch, next};
        for (int64_t token = 0; token < tokens; token += K)
            for (int64_t kv = 0; kv < count; ++kv) {
                const int64_t at = kv * size;
                for (int64_t k = 0; k < K; ++k) prefetch(run.ahead(token + k) + at, size);
                pairwise::score_keys<Way, G>(queries + kv * G * size, key + token * keys.pitch + at, keys.pitch,
                                             std::min(K, tokens - token), size, p.scale, seen,
                                             scores + kv * G * seen + index + token);
            }
    });
    for (int64_t h = 0; h < heads; ++h) {
        soften(p, head + h, keys.first, keys.count(), scores + h * seen);
        std::fill(scores + h * seen + keys.count(), scores + (h + 1) * seen, 0.0f);
    }
    const typename Way::Input* weights = weights_of(Way(), scores, heads * seen, memory);
    std::fill(sums, sums + heads * size, 0.0f);
    values.runs(after, [&](int64_t index, const bfloat16* value, int64_t tokens, const bfloat16* next) {
        const Run run{value, tokens, values.pitch, next};
        for (int64_t kv = 0; kv < count; ++kv) {
            const typename Way::Input* own = weights + kv * G * seen + index;
            float* into = sums + kv * G * size;
            int64_t d = 0;
            for (; d + 64 <= size; d += 64) weigh_run<Way, G, 2>(own, seen, run, kv * size + d, size, into + d);
            for (; d < size; d += 32) weigh_run<Way, G, 1>(own, seen, run, kv * size + d, size, into + d);
        }
    });
    for (int64_t d = 0; d < heads * size; d += pairwise::DEPTH) pairwise::put_values<Way>(sums + d, out + d);
}

#endif

constexpr int64_t AT_ONCE = 4;  // query heads

static inline int64_t chunks(const Paged& p) { return (p.heads / p.kv_heads + AT_ONCE - 1) / AT_ONCE; }

template <typename C>
static inline Seen<C> seen_by(const Paged& p, int64_t row, int64_t kv) {
    const int64_t length = p.lengths[row], first = first_seen(length - 1, p.window, p.chunk);
    return {(const C*)p.cache + kv * p.size, p.tables + row * p.columns, first, length, p.block, p.vectors * p.size};
}

// Up to four of the query heads that share key and value head `kv` in one row.
template <typename T, typename C>
static void attend_chunk(const Paged& p, int64_t row, int64_t kv, int64_t chunk, Memory& memory, float* sums) {
    const int64_t group = p.heads / p.kv_heads, size = p.size;
    const int64_t head = kv * group + chunk * AT_ONCE, count = std::min(AT_ONCE, group - chunk * AT_ONCE);
    const Seen<C> keys = seen_by<C>(p, row, kv);
    const T* queries = (const T*)p.queries + row * p.stride + head * size;
    switch (count) {
        case 1: attend<1>(p, head, queries, keys, memory, sums); break;
        case 2: attend<2>(p, head, queries, keys, memory, sums); break;
        case 3: attend<3>(p, head, queries, keys, memory, sums); break;
        default: attend<4>(p, head, queries, keys, memory, sums); break;
    }
    T* out = (T*)p.out + (row * p.heads + head) * size;
    for (int64_t i = 0; i < count * size; ++i) put(out + i, sums[i]);
}

template <typename T, typename C>
static void attend_all(const Paged& p) {
    const int64_t parts = p.kv_heads * chunks(p);
    team::run(true, [&](team::Member& member) {
        Memory memory;
        std::vector<float> sums(size_t(AT_ONCE * p.size));
        member.each(p.rows * parts, [&](int64_t i) {
            attend_chunk<T, C>(p, i / parts, i % parts / chunks(p), i % chunks(p), memory, sums.data());
        });
    });
}

#if defined(HAS_PRODUCTS)

// Up to four of the query heads of each of `count` key and value heads from `kv` on, in one row.
template <class Way>
static void attend_chunk(const Paged& p, int64_t row, int64_t kv, int64_t count, int64_t chunk, Memory& memory) {
    const int64_t group = p.heads / p.kv_heads, head = kv * group + chunk * AT_ONCE;
    const Seen<bfloat16> keys = seen_by<bfloat16>(p, row, kv);
    const bfloat16* queries = (const bfloat16*)p.queries + row * p.stride + head * p.size;
    const bfloat16* after = seen_by<bfloat16>(p, std::min(row + 1, p.rows - 1), kv).begin();
    bfloat16* out = (bfloat16*)p.out + (row * p.heads + head) * p.size;
    switch (std::min(AT_ONCE, group - chunk * AT_ONCE)) {
        case 1: return attend_pairs<Way, 1>(p, head, count, queries, keys, after, memory, out);
        case 2: return attend_pairs<Way, 2>(p, head, count, queries, keys, after, memory, out);
        case 3: return attend_pairs<Way, 3>(p, head, count, queries, keys, after, memory, out);
        default: return attend_pairs<Way, 4>(p, head, count, queries, keys, after, memory, out);
    }
}

// As `attend_all`, by products of bfloat16. With rows for all threads, a thread takes all heads of a row.
template <class Way>
static void attend_all_pairs(const Paged& p) {
    const bool whole = chunks(p) == 1 && p.rows >= 2 * team::size();
    const int64_t together = whole ? p.kv_heads : 1, parts = p.kv_heads / together * chunks(p);
    team::run(true, [&](team::Member& member) {
        Memory memory;
        member.each(p.rows * parts, [&](int64_t i) {
            const int64_t kv = i % parts / chunks(p) * together;
            attend_chunk<Way>(p, i / parts, kv, together, i % chunks(p), memory);
        });
    });
}

#endif

template <typename T>
static void with_cache(const Paged& p, int64_t cache) {
#if defined(HAS_PRODUCTS)
    const bool pairs = std::is_same_v<T, bfloat16> && cache == CACHE_BFLOAT16 && p.size % pairwise::DEPTH == 0;
    if (pairs) return by_vectors([&](auto way) { attend_all_pairs<decltype(way)>(p); });
#endif
    switch (cache) {
        case CACHE_FLOAT32: return attend_all<T, float>(p);
        case CACHE_BFLOAT16: return attend_all<T, bfloat16>(p);
        case CACHE_INT8: return attend_all<T, int8_t>(p);
        case CACHE_E4M3: return attend_all<T, e4m3>(p);
    }
}

// out: (rows, heads x size).
EXPORT void paged_attention(int64_t type, int64_t cache, const Paged* p) {
    if (type == FLOAT32)
        with_cache<float>(*p, cache);
    else
        with_cache<bfloat16>(*p, cache);
}

// Copies (tokens, bytes), `stride` bytes from token to token, to the slots of the cache.
EXPORT void write_slots(const char* values, int64_t stride, const int64_t* slots, int64_t tokens, int64_t bytes,
                        char* cache) {
    for (int64_t token = 0; token < tokens; ++token)
        std::memcpy(cache + slots[token] * bytes, values + token * stride, size_t(bytes));
}

// value / scale, rounded to the nearest number, halves to even, and saturated.
static inline void store(int8_t* into, float value, float scale) {
    *into = int8_t(std::nearbyint(std::min(127.0f, std::max(-128.0f, value / scale))));
}

static inline void store(e4m3* into, float value, float scale) {
    const float exact = value / scale;
    const uint32_t sign = to_bits(exact) >> 24 & 0x80;
    const float magnitude = std::min(448.0f, std::fabs(exact));
    const uint32_t bits = to_bits(magnitude), rounded = bits + 0x7ffff + ((bits >> 20) & 1);
    // Below 2^-6 numbers are multiples of 2^-9. The exponent's bias is 7 instead of 127.
    const uint32_t code = magnitude < 0x1p-6f ? uint32_t(std::nearbyint(magnitude * 0x1p9f)) : (rounded >> 20) - 120 * 8;
    into->bits = uint8_t(sign | (exact != exact ? 0x7f : code));
}

template <typename T, typename C>
static void store_slots(const T* values, int64_t stride, const int64_t* slots, int64_t tokens, int64_t count, C* cache,
                        float scale) {
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t i = 0; i < count; ++i) store(cache + slots[token] * count + i, to_float(values[token * stride + i]), scale);
}

template <typename T>
static void store_any(int64_t cache_type, const T* values, int64_t stride, const int64_t* slots, int64_t tokens,
                      int64_t count, void* cache, float scale) {
    if (cache_type == CACHE_INT8)
        store_slots(values, stride, slots, tokens, count, (int8_t*)cache, scale);
    else
        store_slots(values, stride, slots, tokens, count, (e4m3*)cache, scale);
}

// As `write_slots`, to a cache of INT8 or E4M3 numbers: (tokens, count) values, `stride` elements from token to token.
EXPORT void quantize_slots(int64_t type, int64_t cache_type, const void* values, int64_t stride, const int64_t* slots,
                           int64_t tokens, int64_t count, void* cache, float scale) {
    if (type == FLOAT32)
        store_any(cache_type, (const float*)values, stride, slots, tokens, count, cache, scale);
    else
        store_any(cache_type, (const bfloat16*)values, stride, slots, tokens, count, cache, scale);
}
