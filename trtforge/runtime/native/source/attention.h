// What paged attention reads: the queries of single tokens, and the blocks of their keys and values.

#pragma once

#include "vectors.h"

#include <vector>

namespace attention {

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

// Tokens whose vectors lie `stride` apart, and where those begin that are read after them.
template <typename C>
struct Run {
    // Most tokens from the one that is read to the one that is fetched, which is of this run or the next.
    static constexpr int64_t DISTANCE = 32;
    const C* first;
    int64_t tokens, stride;
    const C* next;

    const C* at(int64_t token) const { return first + token * stride; }

    const C* ahead(int64_t token) const {
        token += std::min(DISTANCE, tokens);
        return token < tokens ? at(token) : next + (token - tokens) * stride;
    }

    // The same tokens, `numbers` further on in their vectors.
    Run from(int64_t numbers) const { return {first + numbers, tokens, stride, next + numbers}; }
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

    // Calls function(index of the first token, run) for tokens that lie together. `after`: what is read after the last.
    template <typename Function>
    void runs(const C* after, Function function) const {
        for (int64_t at = first; at < length;) {
            const int64_t offset = at % block, tokens = std::min(block - offset, length - at);
            const C* from = cache + (table[at / block] * block + offset) * pitch;
            at += tokens;
            const C* next = at < length ? cache + table[at / block] * block * pitch : after;
            function(at - tokens - first, Run<C>{from, tokens, pitch, next});
        }
    }
};

// The memory of one thread: grows, and is not cleared.
struct Memory {
    std::vector<float> floats, queries;
    std::vector<bfloat16> halves;
};

}  // namespace attention
