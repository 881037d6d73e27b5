"""The tokens that top_k and top_p leave of a distribution, in the vocabulary's order, and draws from them, or of all.

In the order of their probabilities, two nearly equal ones would change places with the last bits of the logits, which
depend on what else a step computes, and draws of the same random number would be others.
A vocabulary of 128,000 tokens takes milliseconds to sort for each row, so that it is not sorted where it need not be.
"""

import torch
from torch import Tensor

_BLOCK = 1024  # weights that are summed before they are looked at one by one
_FINER = 16.0  # by how much a threshold of probabilities is lowered
_SUM_ROUNDING = 1e-6  # of sums of probabilities in float32
_BITS_32 = 0xFFFFFFFF
_BELOW_1 = 1.0 - 2.0**-24  # in float32


def most_likely_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Of logits (rows, vocabulary) the most likely tokens (rows, most) and their weights.

    top_k, top_p: (rows, 1). top_p counts within the top_k tokens. `most`: the largest top_k. Of equally likely tokens
    the first of the vocabulary are kept, whatever `most` is.
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
    """int64 numbers (rows, vocabulary) in the order of float32 logits; of equal logits the first has the largest."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # numbers in the order of the logits: those below 0 descend without it
    vocabulary = logits.shape[1]
    return (bits.long() << 32) | torch.arange(vocabulary - 1, -1, -1, device=logits.device)


def nucleus(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Of logits (vocabulary,) the most likely tokens that together have the probability `top_p`, and their weights.

    All tokens for 1. (Holtzman et al. 2020, arXiv:1904.09751)
    """
    probabilities = logits.softmax(dim=0)
    if top_p >= 1.0:
        return torch.arange(len(logits), device=logits.device), probabilities
    # Tokens above a threshold that together are likely enough hold all that is sought. Those below `least` together
    # have at most half of what may be left out.
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
    kept = torch.zeros_like(kept).index_fill_(0, candidates[order[:count]], True)  # sooner than sorting them
    found = kept.nonzero().squeeze(1)
    return found, probabilities[found]


def drawn_of_all(logits: Tensor, keys: Tensor) -> Tensor:
    """Of float32 logits (rows, vocabulary) a token of each row, with the probability that their softmax gives it.

    keys: int64 (rows,), 64 random bits each. Token 0 where none is possible.
    """
    top = logits.amax(dim=1, keepdim=True)  # noise beside large logits would be rounded away
    noise = gumbel_noise(keys, logits.shape[1])
    return noise.add_(logits - torch.where(top.isfinite(), top, 0.0)).argmax(dim=1)


def gumbel_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """float32 (rows, vocabulary): the largest sum of a logit and its noise is the token that is drawn.

    See native/source/gumbel.h, which computes the same but for the last bits. keys: int64 (rows,).
    """
    first, second = (part.unsqueeze(1) for part in (keys & _BITS_32, (keys >> 32) & _BITS_32))
    h = (torch.arange(vocabulary, device=keys.device) * 0x9E3779B9 + first) & _BITS_32
    h = _mixed(h, 0x85EBCA6B, 13, 0xC2B2AE35)
    h = _mixed((h + second) & _BITS_32, 0x7FEB352D, 15, 0x846CA68B)
    quantile = h.float().add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_1)
    return quantile.neg_().log1p_().neg_().log_().neg_()


def _mixed(h: Tensor, factor: int, shift: int, second: int) -> Tensor:
    """A bijection of numbers of 32 bits, as int64."""
    h = ((h ^ (h >> 16)) * factor) & _BITS_32
    h = ((h ^ (h >> shift)) * second) & _BITS_32
    return h ^ (h >> 16)


def chosen_places(weights: Tensor, shares: Tensor) -> Tensor:
    """Of weights (rows, candidates) the first place in each row up to which more than its share of them lies.

    shares: float64 (rows,) in [0, 1). Places with weight 0 are not chosen unless all are. The host does not wait for a
    GPU, which sums all weights.
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
    """The first place of each row (rows, places) whose sum is above the target (rows, 1), within what has weight."""
    last = (sums < sums[:, -1:]).sum(dim=1)
    return torch.minimum((sums <= target).sum(dim=1), last)
