// Gumbel noise for sampling from all tokens (the Gumbel-max trick): the token with the largest logit + noise is drawn, with
// the probability that the softmax gives it (Maddison et al. 2014, "A* Sampling", arXiv:1411.0030, section 2). This needs no
// sum over the vocabulary.

#pragma once

#include "vectors.h"

// The noise of each token as a function of `key`: a 32-bit hash of the token (the finalisers of MurmurHash3 and then of
// Wellons' "lowbias32") gives the quantile of the distribution. runtime/candidates.py computes the same.
struct Gumbel {
    uint32_t first, second;

    explicit Gumbel(uint64_t key) : first(uint32_t(key)), second(uint32_t(key >> 32)) {}

    // Quantiles in (0, 1), for tokens below 2^32. A smaller quantile means larger noise.
    Vector quantiles(Words tokens) const {
        Words h = tokens * 0x9e3779b9u + first;
        h = (h ^ (h >> 16)) * 0x85ebca6bu;
        h = (h ^ (h >> 13)) * 0xc2b2ae35u;
        h = (h ^ (h >> 16)) + second;
        h = (h ^ (h >> 16)) * 0x7feb352du;
        h = (h ^ (h >> 15)) * 0x846ca68bu;
        h ^= h >> 16;
        const Vector most = Vector() + 0x1.fffffep-1f, v = (__builtin_convertvector(h, Vector) + 0.5f) * 0x1p-32f;
        return v < most ? v : most;
    }

    // Between -2.9 and 22.9.
    static Vector noise(Vector quantiles) {
        // -log(1 - v), accurate for small v (Kahan; Goldberg 1991, theorem 4).
        const Vector rest = 1.0f - quantiles, lost = 1.0f - rest;
        const Vector exponential = lost > 0.0f ? -logarithm(rest) * (quantiles / lost) : quantiles;
        return -logarithm(exponential);
    }

    // Tokens with this quantile or a larger one have noise below `least`, by a small margin, because the quantile v is less
    // than -log(1 - v) = exp(-noise).
    static float quantile_of(float least) { return exponential(0.01f - least); }
};

// Upper bound of |noise|.
constexpr float MOST_NOISE = 23.0f;

// Bound of the rounding error of the sum of a number and its noise.
template <typename V>
static inline V rounding_of_sum(V number) {
    return (absolute(number) + MOST_NOISE) * 0x1p-20f;
}
