"""The tokens that top_k and top_p leave of a distribution, in vocabulary order, and draws from them or from all tokens.

In order of probability, two nearly equal tokens could swap places with the last bits of the logits, which depend on the
rest of the batch; the same random number would then draw a different token.
Sorting a vocabulary of 128,000 tokens takes milliseconds per row, so it is avoided where possible.
"""

import torch
from torch import Tensor

_BLOCK = 1024  # weights summed together before a search among single ones
_FINER = 16.0  # factor by which the probability threshold is lowered
_SUM_ROUNDING = 1e-6  # rounding error of sums of probabilities in float32
_BITS_32 = 0xFFFFFFFF
_BELOW_1 = 1.0 - 2.0**-24  # largest float32 below 1


def most_likely_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens (rows, most) of logits (rows, vocabulary), and their weights.

    top_k, top_p: (rows, 1). top_p applies to the distribution of the top_k tokens. `most`: the largest top_k. Of
    equally likely tokens, those with lower ids are kept, whatever `most` is.
    """
    whole = most == logits.shape[1]
    if whole:
        values, candidates = logits.sort(dim=1, descending=True, stable=True)
    else:
        candidates = _in_order(logits).topk(most, dim=1).indices
        values = logits.gather(1, candidates)
    ranks = torch.arange(values.shape[1], device=logits.device)
    probabilities = values.masked_fill(ranks >= top_k, float("-inf")).softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    weights = probabilities.masked_fill_((before >= top_p) & (ranks > 0), 0.0)
    if whole:
        return ranks.expand_as(candidates), torch.zeros_like(weights).scatter_(1, candidates, weights)
    candidates, order = candidates.sort(dim=1)
    return candidates, weights.gather(1, order)


def _in_order(logits: Tensor) -> Tensor:
    """int64 sort keys (rows, vocabulary) of float32 logits; of equal logits the first has the largest key."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # integers in the order of the logits: without this, negative ones are reversed
    vocabulary = logits.shape[1]
    return (bits.long() << 32) | torch.arange(vocabulary - 1, -1, -1, device=logits.device)


def nucleus(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The most likely tokens of logits (vocabulary,) that together have the probability `top_p`, and their weights.

    All tokens if `top_p` is 1. (Holtzman et al. 2020, arXiv:1904.09751)
    """
    probabilities = logits.softmax(dim=0)
    if top_p >= 1.0:
        return torch.arange(len(logits), device=logits.device), probabilities
    # If the tokens above a threshold have more than `top_p` together, they include the nucleus. The tokens below
    # `least` have at most half of the probability that may be left out.
    least = (1.0 - top_p) / (2 * len(logits))
    threshold = float(probabilities.max())
    kept = probabilities >= least
    while threshold > least:
        threshold /= _FINER
        likely = probabilities >= threshold
        if float((probabilities * likely).sum()) > top_p + _SUM_ROUNDING:
            kept = likely
            break
    candidates = kept.nonzero().squeeze(1)
    if not len(candidates):  # no token is possible
        return candidates.new_zeros(1), probabilities.new_ones(1)
    weights, order = probabilities[candidates].sort(descending=True, stable=True)
    count = max(1, int((weights.cumsum(dim=0) - weights < top_p).sum()))
    kept = torch.zeros_like(kept).index_fill_(0, candidates[order[:count]], True)  # faster than sorting them
    found = kept.nonzero().squeeze(1)
    return found, probabilities[found]


def drawn_of_all(logits: Tensor, keys: Tensor) -> Tensor:
    """Draw a token for each row of float32 logits (rows, vocabulary) from their softmax.

    keys: int64 (rows,), 64 random bits each. Token 0 if no token is possible.
    """
    top = logits.amax(dim=1, keepdim=True)  # added to large logits, the noise would be rounded away
    noise = gumbel_noise(keys, logits.shape[1])
    return noise.add_(logits - torch.where(top.isfinite(), top, 0.0)).argmax(dim=1)


def gumbel_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise, float32 (rows, vocabulary): the argmax of logits plus noise is a draw from their softmax.

    native/source/gumbel.h computes the same up to the last bits. keys: int64 (rows,).
    """
    first, second = (part.unsqueeze(1) for part in (keys & _BITS_32, (keys >> 32) & _BITS_32))
    h = (torch.arange(vocabulary, device=keys.device) * 0x9E3779B9 + first) & _BITS_32
    h = _mixed(h, 0x85EBCA6B, 13, 0xC2B2AE35)
    h = _mixed((h + second) & _BITS_32, 0x7FEB352D, 15, 0x846CA68B)
    quantile = h.float().add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_1)
    return quantile.neg_().log1p_().neg_().log_().neg_()


def _mixed(h: Tensor, factor: int, shift: int, second: int) -> Tensor:
    """A bijection of 32-bit integers, stored as int64."""
    h = ((h ^ (h >> 16)) * factor) & _BITS_32
    h = ((h ^ (h >> shift)) * second) & _BITS_32
    return h ^ (h >> 16)


def chosen_places(weights: Tensor, shares: Tensor) -> Tensor:
    """The first index in each row of weights (rows, candidates) at which the cumulative sum exceeds the row's share.

    shares: float64 (rows,) in [0, 1), of the row's total weight. Indices of weight 0 are chosen only if all weights are
    0. The host does not wait for a GPU, which sums all weights.
    """
    if weights.is_cuda or weights.shape[1] <= _BLOCK:
        sums = weights.double().cumsum(dim=1)
        return _place(sums, shares.unsqueeze(1) * sums[:, -1:])
    whole = weights.shape[1] // _BLOCK * _BLOCK
    parts = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=2, dtype=torch.float64)
    rest = weights[:, whole:].sum(dim=1, keepdim=True, dtype=torch.float64)
    sums = torch.cat((parts, rest), dim=1).cumsum(dim=1)
    target = shares.unsqueeze(1) * sums[:, -1:]
    blocks = _place(sums, target)
    places = []
    for row, block in enumerate(blocks.tolist()):
        inside = weights[row, block * _BLOCK : (block + 1) * _BLOCK].double().cumsum(dim=0)
        before = sums[row, block - 1] if block else 0.0
        places.append(block * _BLOCK + _place(inside.unsqueeze(0), (target[row] - before).unsqueeze(0)))
    return torch.cat(places)


def _place(sums: Tensor, target: Tensor) -> Tensor:
    """The first index in each row of sums (rows, places) above the target (rows, 1), at most the last with weight."""
    last = (sums < sums[:, -1:]).sum(dim=1)
    return torch.minimum((sums <= target).sum(dim=1), last)
