// The gated delta rule of linear attention. For single tokens, each state is read and written once. For sequences, a few
// columns of a state stay in the L1 cache for all tokens, which is possible because columns are independent.

#include "team.h"
#include "vectors.h"

#include <vector>

// One token of each row. from, to: the states (heads, key_size, value_size) of each row before and after the token; both may
// be the same memory. queries, keys: (rows, heads, key_size); values, out: (rows, heads, value_size); rates and log decays:
// (rows, heads).
struct DeltaTokens {
    const float* const* from;
    float* const* to;
    const float *queries, *keys, *values, *rates, *decays;
    float* out;
    int64_t rows, heads, key_size, value_size;
};

// known (size) = the value that the state returns for a key.
static void recall(const float* state, const float* key, int64_t key_size, int64_t size, float* known) {
    std::fill(known, known + size, 0.0f);
    for (int64_t k = 0; k < key_size; ++k) {
        const float factor = key[k], *row = state + k * size;
#pragma omp simd
        for (int64_t v = 0; v < size; ++v) known[v] += row[v] * factor;
    }
}

static void advance(const DeltaTokens& d, int64_t row, int64_t head, float* learned) {
    const int64_t place = row * d.heads + head, size = d.value_size;
    const float *key = d.keys + place * d.key_size, *query = d.queries + place * d.key_size;
    const float *from = d.from[row] + head * d.key_size * size, *value = d.values + place * size;
    float *to = d.to[row] + head * d.key_size * size, *out = d.out + place * size;
    const float decay = std::exp(d.decays[place]), rate = d.rates[place];
    recall(from, key, d.key_size, size, learned);
    for (int64_t v = 0; v < size; ++v) learned[v] = (value[v] - decay * learned[v]) * rate;
    std::fill(out, out + size, 0.0f);
    for (int64_t k = 0; k < d.key_size; ++k) {
        const float factor = key[k], asked = query[k], *before = from + k * size;
        float* after = to + k * size;
#pragma omp simd
        for (int64_t v = 0; v < size; ++v) {
            const float now = before[v] * decay + learned[v] * factor;
            after[v] = now;
            out[v] += now * asked;
        }
    }
}

EXPORT void delta_tokens(const DeltaTokens* given) {
    const DeltaTokens& d = *given;
    team::run(d.rows * d.heads * d.key_size * d.value_size >= PARALLEL_FROM, [&](team::Member& member) {
        std::vector<float> learned(size_t(d.value_size));
        member.each(d.rows * d.heads, [&](int64_t i) { advance(d, i / d.heads, i % d.heads, learned.data()); });
    });
}

// Tokens of one sequence, in order. from, to: the state (heads, key_size, value_size) before and after them. queries, keys:
// (tokens, heads, key_size); values, out: (tokens, heads, value_size); rates and log decays: (tokens, heads).
struct DeltaSequence {
    const float* from;
    float* to;
    const float *queries, *keys, *values, *rates, *decays;
    float* out;
    int64_t tokens, heads, key_size, value_size;
};

constexpr int64_t VECTORS = 2, COLUMNS = VECTORS * WIDTH;  // of a state, computed together

// Applies all tokens to `count` columns of a head's state, from column `first` on. state: (key_size, COLUMNS), zero beyond
// `count`. While a token updates the state, the same pass looks up the next token's key. There is at least one token.
static void advance_columns(const DeltaSequence& d, int64_t head, int64_t first, int64_t count, float* state) {
    Vector known[VECTORS] = {};
    for (int64_t k = 0; k < d.key_size; ++k)
        for (int64_t v = 0; v < VECTORS; ++v)
            known[v] += load(state + k * COLUMNS + v * WIDTH) * d.keys[head * d.key_size + k];
    for (int64_t token = 0; token < d.tokens; ++token) {
        const int64_t place = token * d.heads + head, following = token + 1 < d.tokens ? place + d.heads : place;
        const float decay = std::exp(d.decays[place]), rate = d.rates[place];
        const float *query = d.queries + place * d.key_size, *key = d.keys + place * d.key_size;
        const float* next = d.keys + following * d.key_size;
        float numbers[COLUMNS] = {};
        std::copy_n(d.values + place * d.value_size + first, count, numbers);
        Vector learned[VECTORS], found[VECTORS] = {}, recalled[VECTORS] = {};
        for (int64_t v = 0; v < VECTORS; ++v) learned[v] = (load(numbers + v * WIDTH) - known[v] * decay) * rate;
        for (int64_t k = 0; k < d.key_size; ++k)
#pragma GCC unroll 2
            for (int64_t v = 0; v < VECTORS; ++v) {
                float* at = state + k * COLUMNS + v * WIDTH;
                const Vector now = load(at) * decay + learned[v] * key[k];
                put(at, now);
                found[v] += now * query[k];
                recalled[v] += now * next[k];
            }
        for (int64_t v = 0; v < VECTORS; ++v) {
            put(numbers + v * WIDTH, found[v]);
            known[v] = recalled[v];
        }
        std::copy_n(numbers, count, d.out + place * d.value_size + first);
    }
}

EXPORT void delta_sequence(const DeltaSequence* given) {
    const DeltaSequence& d = *given;
    const int64_t parts = (d.value_size + COLUMNS - 1) / COLUMNS;
    team::run(d.tokens * d.heads * d.key_size * d.value_size >= PARALLEL_FROM, [&](team::Member& member) {
        member.each(d.heads * parts, [&](int64_t i) {
            const int64_t head = i / parts, first = i % parts * COLUMNS, count = std::min(COLUMNS, d.value_size - first);
            const int64_t place = head * d.key_size * d.value_size + first;
            float* state = memory_for<float>(d.key_size * COLUMNS);
            std::fill(state, state + d.key_size * COLUMNS, 0.0f);
            for (int64_t k = 0; k < d.key_size; ++k)
                std::copy_n(d.from + place + k * d.value_size, count, state + k * COLUMNS);
            if (d.tokens > 0) advance_columns(d, head, first, count, state);
            for (int64_t k = 0; k < d.key_size; ++k)
                std::copy_n(state + k * COLUMNS, count, d.to + place + k * d.value_size);
        });
    });
}
