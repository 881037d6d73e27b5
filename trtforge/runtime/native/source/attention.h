// The inputs of paged attention (single-token queries, and the KV blocks of their sequences) and its online softmax.

#pragma once

#include "vectors.h"

#include <limits>
#include <vector>

namespace attention {

// tables: (rows, columns) block numbers; lengths: number of tokens of each row, its own included. A token's slot holds
// `vectors` vectors of `size` elements, a multiple of 16: keys then values, or one vector that is both. `stride`: row stride
// of queries. `window`: number of tokens that a query sees, 0 for all; `chunk`: a query sees only its own chunk of this size,
// 0 for all. `cap`: scores become cap * tanh(score / cap), 0 for none. `slopes`: ALiBi slopes, one per query head, or null.
// `sinks`: extra logits in the softmax, one per query head, or null. Keys and values are the stored elements times
// `cache_scale`. `seen`: for each row, one bit for each of the last 64 slots, set if the row sees it (the highest bit is its
// own slot); null if all rows see all slots.
struct Paged {
    const void* queries;
    const void* cache;
    void* out;
    const int64_t* tables;
    const int64_t* lengths;
    const float* slopes;
    const float* sinks;
    const uint64_t* seen;
    int64_t rows, columns, block, vectors, stride, heads, kv_heads, size, window, chunk;
    float scale, cap, cache_scale;
};

// `type`: of queries and outputs, FLOAT32 or BFLOAT16.
struct Rows : Paged {
    int64_t type;

    bool sees_all(int64_t row) const { return !seen || seen[row] == ~uint64_t(0); }
    int64_t width() const { return type == FLOAT32 ? int64_t(sizeof(float)) : int64_t(sizeof(bfloat16)); }
};

// Tokens with a constant stride between their vectors.
template <typename C>
struct Run {
    const C* first;
    int64_t tokens, stride;

    const C* at(int64_t token) const { return first + token * stride; }

    // The same tokens, starting `numbers` elements later in each slot.
    Run from(int64_t numbers) const { return {first + numbers, tokens, stride}; }
};

// Tokens [first, length) of one row.
template <typename C>
struct Seen {
    const C* cache;
    const int64_t* table;
    int64_t first, length, block, pitch;  // pitch: stride between slots

    int64_t count() const { return length - first; }

    const C* at(int64_t token) const { return cache + (table[token / block] * block + token % block) * pitch; }

    // At most `most` of these tokens, from token `from` on.
    Seen part(int64_t from, int64_t most) const {
        return {cache, table, from, std::min(from + most, length), block, pitch};
    }

    // Calls function(index of the first token, run) for each contiguous run of tokens.
    template <typename Function>
    void runs(Function function) const {
        for (int64_t token = first; token < length;) {
            const int64_t tokens = std::min(block - token % block, length - token);
            function(token - first, Run<C>{at(token), tokens, pitch});
            token += tokens;
        }
    }
};

// Relative costs, for one token and one query head: the score, its softmax, and adding the value.
constexpr int64_t SCORING = 4, SOFTENING = 1, ADDING = 4, WHOLE = SCORING + SOFTENING + ADDING;

// Cache lines to prefetch, `each` bytes per step.
struct Lines {
    const char *from = nullptr, *end = nullptr;
    int64_t each = 0;

    inline __attribute__((always_inline)) void step() {
        for (const char* stop = std::min(from + each, end); from < stop; from += 64) __builtin_prefetch(from, 0, 2);
    }
};

// Prefetches the slots of tokens while other tokens are computed, in address order: memory delivers that faster than the
// order in which keys and values are read.
template <typename C>
class Fetch {
  public:
    // `computed`: tokens times query heads that are computed in the meantime.
    Fetch(const Seen<C>& tokens, int64_t computed) : tokens_(tokens), token_(tokens.first) {
        const int64_t parts = computed * WHOLE;
        pace_ = (lines_of(tokens.count()) * SHARES + parts - 1) / parts;
    }

    // The lines to prefetch while work of cost `parts` is done in `steps` steps; only from the current contiguous run.
    Lines due(int64_t parts, int64_t steps) {
        if (left_ == 0 && token_ < tokens_.length) turn();
        due_ += parts * pace_;
        const int64_t lines = std::min(due_ / SHARES, left_);
        const Lines made{from_, from_ + lines * 64, (lines + steps - 1) / steps * 64};
        from_ = made.end;
        due_ -= lines * SHARES;
        left_ -= lines;
        return made;
    }

    void advance(int64_t parts) { due(parts, 1).step(); }

  private:
    static constexpr int64_t SHARES = 1024;  // fractions of a line, for fixed-point arithmetic

    int64_t lines_of(int64_t tokens) const { return (tokens * tokens_.pitch * int64_t(sizeof(C)) + 63) / 64; }

    // Moves on to the next contiguous run of tokens.
    void turn() {
        const int64_t count = std::min(tokens_.block - token_ % tokens_.block, tokens_.length - token_);
        from_ = (const char*)tokens_.at(token_);
        left_ = lines_of(count);
        token_ += count;
    }

    const Seen<C> tokens_;
    int64_t token_, pace_, due_ = 0, left_ = 0;
    const char* from_ = nullptr;
};

// Online softmax of a query head (Milakov and Gimelshein 2018): the largest score so far, and sums of the exponentials of
// all scores relative to it. Scores are multiplied by LOG2_E, so that exponentials are powers of two.
struct Softmax {
    float largest = std::numeric_limits<float>::lowest();
    Vector sums = {};

    // Replaces `count` scores, a multiple of WIDTH, by their exponentials. Returns the factor that corrects earlier results,
    // which were relative to a smaller maximum.
    float add(float* scores, int64_t count) {
        Vector most = Vector() + largest;
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Vector v = load(scores + i);
            most = most < v ? v : most;
        }
        const float before = largest;
        largest = largest_of(most);
        const float factor = before == largest ? 1.0f : power_of_negative(before - largest);
        sums *= factor;
        for (int64_t i = 0; i < count; i += WIDTH) {
            const Vector p = power_of_negative(load(scores + i) - largest);
            put(scores + i, p);
            sums += p;
        }
        return factor;
    }
};

// Partial results of a row's query heads over some of its tokens. values: (heads, size), weighted sums.
struct Found {
    std::vector<Softmax> softmax;
    std::vector<float> values;

    void start(int64_t heads, int64_t size) {
        softmax.assign(size_t(heads), Softmax());
        values.assign(size_t(heads * size), 0.0f);
    }
};

// Scratch memory of one thread, reused between calls.
struct Memory {
    std::vector<float> scores, queries;
    std::vector<bfloat16> halves;
    Found found;
};

}  // namespace attention
