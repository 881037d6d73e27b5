"""Confidence intervals of a verification's figures by the bootstrap over blocks of tokens, paired between models.

Tokens of one passage are not independent, so whole blocks are drawn with replacement (percentile intervals: Efron and
Tibshirani, An Introduction to the Bootstrap, 1993; blocks: Künsch, 1989). A comparison of models uses each model's sums
over the same blocks, which cancels the difficulty of a passage for both. There is no interval if one of its ends is out
of float64's range.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtforge.verify.result import Blocks, Interval

_DRAWS = 2000
LEAST_BLOCKS = 8
"""Fewer blocks do not show the spread."""
_COVERED = 0.95
_TAIL = 0.01  # share of the tokens above the 99th percentile

Array = npt.NDArray[np.float64]


def perplexity_interval(blocks: Blocks) -> Interval | None:
    """The interval of the perplexity's relative increase; None with too few blocks."""
    return _increase(blocks.tokens, blocks.candidate, blocks.reference)


def divergence_interval(blocks: Blocks) -> Interval | None:
    """The interval of the mean KL divergence; None with too few blocks."""
    return _interval(_means(blocks.tokens, blocks.divergence))


def perplexity_difference(one: Blocks, other: Blocks) -> Interval | None:
    """The interval of the perplexity's relative increase from candidate `one` to `other`; None with too few blocks."""
    return _increase(one.tokens, other.candidate, one.candidate)


def divergence_difference(one: Blocks, other: Blocks) -> Interval | None:
    """The interval of the mean KL divergence's increase from candidate `one` to `other`; None with too few blocks."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _interval(_means(one.tokens, np.subtract(other.divergence, one.divergence)))


def percentile_99(values: Array) -> float:
    """The smallest value that at most 1 % of `values` exceed. Raises ValueError without values."""
    return float(np.quantile(values, 1 - _TAIL, method="higher"))


def percentile_interval(values: Array, block_of: npt.NDArray[np.int64], blocks: Blocks) -> Interval | None:
    """The interval of the 99th percentile of `values`, one per token; `block_of`: each token's block."""
    draws = _draws(len(blocks.tokens))
    if draws is None or not np.isfinite(values).all():
        return None
    order = np.argsort(-values, kind="stable")
    totals = draws @ np.asarray(blocks.tokens, dtype=np.float64)
    found = [
        values[order[min(int(np.searchsorted(np.cumsum(draw[block_of[order]]), _TAIL * total)), len(order) - 1)]]
        for draw, total in zip(draws[: _DRAWS // 4], totals, strict=False)
    ]
    return _interval(np.asarray(found))


def _increase(tokens: Sequence[int], worse: Sequence[float], better: Sequence[float]) -> Interval | None:
    with np.errstate(over="ignore", invalid="ignore"):
        found = _interval(_means(tokens, np.subtract(worse, better)))
        return None if found is None else _finite(np.expm1(found.low), np.expm1(found.high))


def _means(tokens: Sequence[int], sums: Sequence[float] | Array) -> Array | None:
    """The mean per token in each draw."""
    draws = _draws(len(tokens))
    if draws is None or not np.isfinite(sums).all():
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        means: Array = (draws @ np.asarray(sums, dtype=np.float64)) / (draws @ np.asarray(tokens, dtype=np.float64))
    return means


def _draws(blocks: int) -> Array | None:
    """(draws, blocks): how often each draw takes each block; the same in every run."""
    if blocks < LEAST_BLOCKS:
        return None
    random = np.random.Generator(np.random.PCG64(blocks))
    return random.multinomial(blocks, np.full(blocks, 1 / blocks), size=_DRAWS).astype(np.float64)


def _interval(found: Array | None) -> Interval | None:
    if found is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = np.quantile(found, [(1 - _COVERED) / 2, (1 + _COVERED) / 2])
    return _finite(low, high)


def _finite(low: float, high: float) -> Interval | None:
    return Interval(low=float(low), high=float(high)) if np.isfinite(low) and np.isfinite(high) else None
