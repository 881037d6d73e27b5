// The inputs of context attention: queries of one sequence, and the blocks of its keys and values.

#pragma once

#include "vectors.h"

namespace context {

constexpr int64_t KEYS = 64;        // in a block
constexpr int64_t QUERIES = 64;     // query tokens in a block, and maximum rows of a panel
constexpr int64_t COLUMNS = 32;     // keys, or elements of a value, in a packed tile
constexpr int64_t HEADS = 4;        // query heads that share a block of keys at once
constexpr int64_t MOST_SIZE = 256;  // maximum elements of a head

// table: block numbers; a token's slot holds 2 x `kv_heads` vectors of `size` elements, a multiple of 32: keys then values.
// queries: (count, heads or more, size), with token stride `stride`, at positions from `start` on. `packed`: memory for 2 x
// `kv_heads` x `size` elements for each key that is seen, rounded to whole blocks at both ends; null if there are at most
// QUERIES query tokens. Other fields are those of `Paged` in attention.h.
struct Context {
    const void* queries;
    const char* cache;
    void* out;
    const int64_t* table;
    const float* slopes;
    const float* sinks;
    void* packed;
    int64_t count, start, block, stride, heads, kv_heads, size, window, chunk;
    float scale, cap, cache_scale;

    int64_t first_by(int64_t position) const { return first_seen(position, window, chunk); }
    int64_t first_block() const { return first_by(start) / KEYS; }
    int64_t end_block() const { return (start + count + KEYS - 1) / KEYS; }

    // Number of chunks of at most HEADS query heads that share a KV head.
    int64_t chunks() const { return (heads / kv_heads + HEADS - 1) / HEADS; }

    // Where a block of one head's keys is packed, in elements of type P; its values follow.
    template <typename P>
    P* at(int64_t kv, int64_t key_block) const {
        return (P*)packed + (kv * (end_block() - first_block()) + key_block - first_block()) * 2 * KEYS * size;
    }
};

// Addresses of the keys of one head in one block of keys. `bytes`: of a vector; `values`: bytes from a key to its value.
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

    // Prefetches the vectors `behind` bytes after the keys: 0 for the keys, `values` for the values.
    void fetch(int64_t behind) const {
        for (int64_t i = 0; i < count; ++i) prefetch(keys[i] + behind, bytes);
    }
};

}  // namespace context

EXPORT void context_attention(int64_t, int64_t, const context::Context*);
