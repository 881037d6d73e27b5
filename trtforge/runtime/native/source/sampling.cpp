// Samples tokens from the softmax of logits, limited by min_p, top_k and top_p, and computes the log-sum-exp of logits.
//
// Weights, exp(logit - largest logit), stay in the vocabulary's order (runtime/candidates.py says why). The smallest
// weight that is kept is found without sorting the vocabulary: the interval that contains it is divided by LEVELS numbers
// again and again, until so FEW weights are in it that they are sorted.

#include "gumbel.h"
#include "team.h"
#include "vectors.h"

#include <cfloat>
#include <functional>
#include <limits>

// logits (any, vocabulary), `stride` apart, of which row `places[i]` is for token i. top_k: of the most likely tokens,
// the vocabulary for all; top_p: up to 1, of the weights that top_k leaves; min_p: up to 1, of the largest weight, or
// null; keys: random bits. `weights`: where the weights go that are left, (rows, vocabulary), or null.
struct Draws {
    const float* logits;
    const int64_t* places;
    const int64_t* top_k;
    const double* top_p;
    const float* min_p;
    const uint64_t* keys;
    int64_t* tokens;
    float* weights;
    int64_t rows, vocabulary, stride;
};

namespace {

constexpr int64_t BLOCK = 1024;   // weights that are summed before they are looked at one by one
constexpr int64_t FEW = 64;       // weights that are sorted
constexpr int LEVELS = 8;         // numbers that divide the interval, at once
constexpr float LOWEST = -87.0f;  // of logit - largest logit; what is less likely than 10^-38 gets no weight

// The weights of one row, of which `count` are whole blocks, with zeros behind the vocabulary.
struct Weights {
    float* all;
    float* band;   // room for as many, and a vector
    double* sums;  // of blocks
    int64_t count;
};

// In memory of the calling thread.
Weights weights_for(int64_t vocabulary) {
    const int64_t count = (vocabulary + BLOCK - 1) / BLOCK * BLOCK;
    float* memory = memory_for<float>(2 * count + WIDTH);
    return {memory, memory + count, memory_for<double>(count / BLOCK), count};
}

float largest_of(const float* logits, int64_t size) {
    float largest = -std::numeric_limits<float>::infinity();
    Vector most = Vector() + largest;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
        const Vector v = load(logits + i);
        most = v > most ? v : most;
    }
    for (; i < size; ++i) largest = std::max(largest, logits[i]);
    return std::max(largest, largest_lane(most));
}

// Tokens whose logit is below largest + lowest get no weight.
void fill(const float* logits, int64_t size, float largest, float lowest, const Weights& into) {
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
        const Vector x = load(logits + i) - largest;
        put(into.all + i, x >= lowest ? exponential(x) : Vector());
    }
    for (; i < size; ++i) {
        const float x = logits[i] - largest;
        into.all[i] = x >= lowest ? exponential(x) : 0.0f;
    }
    std::fill(into.all + size, into.all + into.count, 0.0f);
}

double sum_blocks(const Weights& w) {
    double total = 0.0;
    for (int64_t block = 0; block < w.count / BLOCK; ++block) {
        Vector lanes[2] = {};
        for (const float *at = w.all + block * BLOCK, *end = at + BLOCK; at < end; at += 2 * WIDTH) {
            lanes[0] += load(at);
            lanes[1] += load(at + WIDTH);
        }
        double sum = 0.0;
        for (int64_t lane = 0; lane < WIDTH; ++lane) sum += double(lanes[0][lane]) + double(lanes[1][lane]);
        w.sums[block] = sum;
        total += sum;
    }
    return total;
}

// What is summed of weights that are kept: 1 for top_k, the weight for top_p.
struct Number {
    template <typename V>
    static V of(V) { return V() + 1.0f; }
};

struct Probability {
    template <typename V>
    static V of(V weight) { return weight; }
};

// Adds to sums[k] what is summed of the weights that are levels[k] at least. Zeros follow the last one.
template <class Counted>
void add_from(const float* weights, int64_t count, const float (&levels)[LEVELS], double* sums) {
    for (int64_t first = 0; first < count; first += BLOCK) {
        Vector lanes[LEVELS];
        clear(lanes);
        for (int64_t i = first; i < std::min(first + BLOCK, count); i += WIDTH) {
            const Vector w = load(weights + i), counted = Counted::of(w);
#pragma GCC unroll 8
            for (int k = 0; k < LEVELS; ++k) lanes[k] += w >= levels[k] ? counted : Vector();
        }
        for (int k = 0; k < LEVELS; ++k)
            for (int64_t lane = 0; lane < WIDTH; ++lane) sums[k] += double(lanes[k][lane]);
    }
}

// Copies weights in [low, high), followed by zeros; `into` may be `from`. Returns how many.
int64_t select(const float* from, int64_t count, float low, float high, float* into) {
    int64_t found = 0;
#if defined(__AVX512F__)
    for (int64_t i = 0; i < count; i += WIDTH) {  // zeros follow the last one
        const __m512 w = _mm512_loadu_ps(from + i);
        const __mmask16 in = _mm512_cmp_ps_mask(w, _mm512_set1_ps(low), _CMP_GE_OQ) &
                             _mm512_cmp_ps_mask(w, _mm512_set1_ps(high), _CMP_LT_OQ);
        _mm512_storeu_ps(into + found, _mm512_maskz_compress_ps(in, w));
        found += __builtin_popcount(in);
    }
#else
    for (int64_t i = 0; i < count; ++i) {
        const float w = from[i];
        into[found] = w;
        found += int64_t(w >= low) & int64_t(w < high);
    }
#endif
    put(into + found, Vector());
    return found;
}

// Weights above `least`, and the first `equal` of those that are equal to it.
struct Kept {
    float least;
    int64_t equal;
};

// The fewest of the largest of `count` weights, which zeros follow, whose sum is `wanted` at least. `band`: room for as
// many and a vector; it may be where they are.
template <class Counted>
Kept fewest(const float* from, int64_t count, float* band, double wanted) {
    uint32_t low = to_bits(FLT_MIN), high = to_bits(1.0f) + 1;  // bits of positive numbers have their order
    uint32_t step = 1 << 24, first = high - LEVELS * step;      // at the beginning each level is a quarter of the next
    double above = 0.0;                                         // of weights from `high` on
    do {
        float levels[LEVELS] = {from_bits(low)};
        double sums[LEVELS + 1] = {};
        for (int k = 1; k < LEVELS; ++k)
            levels[k] = first + k * step < high ? from_bits(first + k * step) : std::numeric_limits<float>::infinity();
        add_from<Counted>(from, count, levels, sums);
        int k = LEVELS - 1;
        while (k > 0 && above + sums[k] < wanted) --k;
        above += sums[k + 1];
        low = k > 0 ? first + k * step : low;
        high = std::min(high, first + (k + 1) * step);
        count = select(from, count, from_bits(low), from_bits(high), band);
        from = band;
        first = low;
        step = (high - low + LEVELS - 1) / LEVELS;
    } while (count > FEW && high - low > 1);
    if (high - low > 1) std::sort(band, band + count, std::greater<float>());
    int64_t kept = 0;
    for (; kept < count && above < wanted; ++kept) above += double(Counted::of(band[kept]));
    if (kept == 0) return {from_bits(high), std::numeric_limits<int64_t>::max()};
    const float least = band[kept - 1];
    return {least, std::count(band, band + kept, least)};
}

// The other weights become 0.
void keep(const Weights& w, Kept kept) {
    Integers lanes = {};
    for (float *at = w.all, *end = at + w.count; at < end; at += WIDTH) {
        const Vector v = load(at);
        put(at, v >= kept.least ? v : Vector());
        lanes -= (Integers)(v == kept.least);
    }
    int64_t equal = 0;
    for (int64_t lane = 0; lane < WIDTH; ++lane) equal += lanes[lane];
    for (float* at = w.all + w.count; equal > kept.equal;)
        if (*--at == kept.least) {
            *at = 0.0f;
            --equal;
        }
}

// The first place up to which more than `target` of the weights lies, or the last one that has weight.
int64_t place_of(const Weights& w, double target) {
    int64_t block = 0;
    double before = 0.0, sum = 0.0;
    for (int64_t i = 0; i < w.count / BLOCK && sum <= target; ++i)
        if (w.sums[i] > 0.0) {
            block = i;
            before = sum;
            sum += w.sums[i];
        }
    int64_t place = block * BLOCK;
    sum = before;
    for (int64_t i = place; i < (block + 1) * BLOCK && sum <= target; ++i)
        if (w.all[i] > 0.0f) {
            place = i;
            sum += double(w.all[i]);
        }
    return place;
}

// The first token whose logit and noise are the largest sum, of those whose logit is the largest + lowest at least. Token
// 0 where none is possible. Most noise is too small for the largest logit of its block, as its quantile tells, and is not
// computed.
int64_t draw_of_all(const float* logits, int64_t size, float lowest, const Gumbel& gumbel) {
    constexpr int64_t TOGETHER = 8 * WIDTH;
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    const float top = largest_of(logits, size);
    const float shift = std::fabs(top) <= FLT_MAX ? top : 0.0f;  // noise beside large logits would be rounded away
    float last[TOGETHER];
    Vector most = Vector() + NONE;
    Words lanes, found = {};
    for (int64_t lane = 0; lane < WIDTH; ++lane) lanes[lane] = uint32_t(lane);
    for (int64_t first = 0; first < size; first += TOGETHER) {
        const float* from = logits + first;
        if (first + TOGETHER > size) {
            std::fill(std::copy(from, logits + size, last), last + TOGETHER, NONE);
            from = last;
        }
        const float so_far = largest_lane(most), largest = largest_of(from, TOGETHER) - shift;
        if (largest < lowest) continue;
        const float enough = Gumbel::quantile_of(so_far - largest - rounding_of_sum(so_far));
        for (int64_t i = 0; i < TOGETHER; i += WIDTH) {
            const Words tokens = lanes + uint32_t(first + i);
            const Vector quantiles = gumbel.quantiles(tokens);
            if (so_far > NONE && !any(quantiles < enough)) continue;
            const Vector x = load(from + i) - shift;
            const Vector sum = x >= lowest ? x + Gumbel::noise(quantiles) : Vector() + NONE;
            found = sum > most ? tokens : found;
            most = sum > most ? sum : most;
        }
    }
    int64_t best = 0;
    for (int64_t lane = 1; lane < WIDTH; ++lane)
        if (most[lane] > most[best] || (most[lane] == most[best] && found[lane] < found[best])) best = lane;
    return most[best] > NONE ? found[best] : 0;
}

// The token up to which a share of the weights lies, or of all tokens one by its noise.
int64_t draw(const Draws& d, int64_t row, const Weights& w) {
    const float* logits = d.logits + d.places[row] * d.stride;
    const float lowest = d.min_p ? std::log(d.min_p[row]) : -std::numeric_limits<float>::infinity();
    if (d.top_k[row] >= d.vocabulary && d.top_p[row] >= 1.0 && !d.weights)
        return draw_of_all(logits, d.vocabulary, lowest, Gumbel(d.keys[row]));
    fill(logits, d.vocabulary, largest_of(logits, d.vocabulary), std::max(lowest, LOWEST), w);
    const float* left = w.all;
    int64_t count = w.count;
    if (d.top_k[row] < d.vocabulary) {
        keep(w, fewest<Number>(left, count, w.band, double(d.top_k[row])));
        count = select(left, count, FLT_MIN, std::numeric_limits<float>::infinity(), w.band);
        left = w.band;
    }
    double total = sum_blocks(w);
    if (d.top_p[row] < 1.0) {
        keep(w, fewest<Probability>(left, count, w.band, d.top_p[row] * total));
        total = sum_blocks(w);
    }
    if (d.weights) std::copy(w.all, w.all + d.vocabulary, d.weights + row * d.vocabulary);
    return place_of(w, double(d.keys[row] >> 11) * 0x1p-53 * total);
}

}  // namespace

EXPORT void draw_tokens(const Draws* d) {
    team::for_each(d->rows, d->rows * d->vocabulary >= PARALLEL_FROM,
                   [=](int64_t row) { d->tokens[row] = draw(*d, row, weights_for(d->vocabulary)); });
}

// sums (rows,): log(sum of exp(logit)) of logits (rows, vocabulary), `stride` apart.
EXPORT void log_sums(const float* logits, float* sums, int64_t rows, int64_t vocabulary, int64_t stride) {
    team::for_each(rows, rows * vocabulary >= PARALLEL_FROM, [=](int64_t row) {
        const float* from = logits + row * stride;
        const Weights w = weights_for(vocabulary);
        const float largest = largest_of(from, vocabulary);
        fill(from, vocabulary, largest, LOWEST, w);
        sums[row] = largest + float(std::log(sum_blocks(w)));
    });
}
