// The gated delta rule of linear attention for single tokens: each state is read and written once.

#include "team.h"
#include "vectors.h"

#include <vector>

// One token of each row. from, to: the states (heads, key_size, value_size) of each row before and after the token, which
// may be the same. queries, keys: (rows, heads, key_size); values, out: (rows, heads, value_size); rates and log decays:
// (rows, heads).
struct DeltaTokens {
    const float* const* from;
    float* const* to;
    const float *queries, *keys, *values, *rates, *decays;
    float* out;
    int64_t rows, heads, key_size, value_size;
};

// known (size) = the state's value for a key.
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
