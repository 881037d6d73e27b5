// Samples tokens from the softmax of logits, limited by min_p, top_k and top_p, and computes the log-sum-exp of logits.
//
// Weights, exp(logit - largest logit), stay in the order of the vocabulary (see runtime/candidates.py for the reason). The
// smallest weight to keep is found without sorting the vocabulary: LEVELS thresholds divide the interval that contains it,
// repeatedly, until at most FEW weights are left in it; these are sorted.

#include "gumbel.h"
#include "team.h"
#include "vectors.h"

#include <cfloat>
#include <functional>
#include <limits>

// logits: (any, vocabulary), with row stride `stride`; row `places[i]` is for token i. top_k: the vocabulary size keeps all
// tokens; top_p: up to 1, fraction of the weights that top_k keeps; min_p: up to 1, fraction of the largest weight, or null;
// keys: random bits. `weights`: (rows, vocabulary) receives the kept weights, or null.
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

constexpr int64_t BLOCK = 1024;   // weights in a block, whose sum is kept
constexpr int64_t FEW = 64;       // maximum weights to sort
constexpr int LEVELS = 8;         // thresholds that divide the interval at once
constexpr float LOWEST = -87.0f;  // minimum of logit - largest logit: tokens of relative probability below 10^-38 get weight 0

// The weights of one row: `count` is the vocabulary size rounded up to whole blocks; zeros follow the vocabulary.
struct Weights {
    float* all;
    float* band;   // scratch for `count` weights and a vector
    double* sums;  // one per block
    int64_t count;
};

// Weights in memory of the calling thread.
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

// Computes the weights. Tokens whose logit is below largest + lowest get weight 0.
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

// What to sum over kept weights: 1 for top_k (`Number`), the weight for top_p (`Probability`).
struct Number {
    template <typename V>
    static V of(V) { return V() + 1.0f; }
};

struct Probability {
    template <typename V>
    static V of(V weight) { return weight; }
};

// Adds to sums[k] the counts (`Counted`) of the weights >= levels[k]. Zeros must follow the last weight.
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

// Copies the weights in [low, high), and zeros after them; `into` may be `from`. Returns their number.
int64_t select(const float* from, int64_t count, float low, float high, float* into) {
    int64_t found = 0;
#if defined(__AVX512F__)
    for (int64_t i = 0; i < count; i += WIDTH) {  // zeros follow the last weight
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

// The weights to keep: those above `least`, and the first `equal` of those equal to it.
struct Kept {
    float least;
    int64_t equal;
};

// The smallest set of the largest of `count` weights whose sum (`Counted`) is at least `wanted`. Zeros must follow the weights.
// `band`: scratch for as many weights and a vector; it may be `from`.
template <class Counted>
Kept fewest(const float* from, int64_t count, float* band, double wanted) {
    uint32_t low = to_bits(FLT_MIN), high = to_bits(1.0f) + 1;  // positive floats and their bits have the same order
    uint32_t step = 1 << 24, first = high - LEVELS * step;      // first, each level is a quarter of the next
    double above = 0.0;                                         // sum over weights >= `high`
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

// Sets all other weights to 0.
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

// The first index up to which the cumulative weight exceeds `target`, or the last index with a weight.
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

// The token with the largest logit + noise (the first on a tie), among tokens whose logit is at least the largest + lowest; 0
// if none is possible. Most noise is not computed: its quantile shows that it is too small even with its block's largest logit.
int64_t draw_of_all(const float* logits, int64_t size, float lowest, const Gumbel& gumbel) {
    constexpr int64_t TOGETHER = 8 * WIDTH;
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    const float top = largest_of(logits, size);
    const float shift = std::fabs(top) <= FLT_MAX ? top : 0.0f;  // added to large logits, noise would be rounded away
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

// Draws a token: by its noise if all tokens are allowed, else by inverting the cumulative weight at a random fraction.
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

// sums (rows,) = log(sum of exp(logit)) of logits (rows, vocabulary), with row stride `stride`.
EXPORT void log_sums(const float* logits, float* sums, int64_t rows, int64_t vocabulary, int64_t stride) {
    team::for_each(rows, rows * vocabulary >= PARALLEL_FROM, [=](int64_t row) {
        const float* from = logits + row * stride;
        const Weights w = weights_for(vocabulary);
        const float largest = largest_of(from, vocabulary);
        fill(from, vocabulary, largest, LOWEST, w);
        sums[row] = largest + float(std::log(sum_blocks(w)));
    });
}
