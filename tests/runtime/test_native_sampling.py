"""Draws by the kernels, with every set of instructions, against sums and sorts in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.kernel_levels import LEVELS, kernels_at
from trtforge.runtime.native.sampling import Limits, draw_tokens, kept_weights, log_sums

ROUNDING = 1e-5
IMPOSSIBLE = float("-inf")
LEAST = 1e-37
"""Less likely tokens, beside the most likely one, have no weight."""


@st.composite
def logits_of(draw: st.DrawFn) -> Tensor:
    """Flat and steep distributions, some tokens impossible, many equally likely."""
    size = draw(st.integers(1, 3000) | st.sampled_from([1024, 2048, 70_000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = torch.randn(size, generator=generator) * draw(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 5.0, 30.0, 1e4]))
    if draw(st.booleans()):
        logits = logits.round()
    hidden = torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.999]))
    hidden[draw(st.integers(0, size - 1))] = False
    return logits.masked_fill(hidden, IMPOSSIBLE)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=150, deadline=None)
@given(logits=logits_of(), top_k=st.integers(1, 3000), top_p=st.floats(1e-6, 1.0))
def test_the_fewest_most_likely_tokens_keep_their_weights(level: str, logits: Tensor, top_k: int, top_p: float) -> None:
    top_k = min(top_k, len(logits))
    weights = kept_weights(kernels_at(level), logits, top_k, top_p).double()
    exact = (logits - logits.max()).double().exp()  # of differences in float32, as the kernels'
    kept, count = weights > 0, int((weights > 0).sum())
    torch.testing.assert_close(weights[kept], exact[kept], rtol=1e-6, atol=0.0)
    assert float(exact[kept].min()) >= float(exact[~kept].max()) * (1 - ROUNDING) if count < len(logits) else True
    probabilities = exact.sort(descending=True).values[:top_k]
    probabilities /= probabilities.sum()
    possible = int((probabilities > LEAST).sum())
    assert 1 <= count <= top_k
    assert count >= possible or float(probabilities[:count].sum()) >= top_p - ROUNDING
    assert float(probabilities[: count - 1].sum()) <= top_p + ROUNDING


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(4, 1.0, 4), (70_000, 0.5, 35_000), (3000, 0.25, 750)])
def test_of_equally_likely_tokens_the_first_are_kept(level: str, top_k: int, top_p: float, kept: int) -> None:
    weights = kept_weights(kernels_at(level), torch.full((70_000,), 3.0), top_k, top_p)
    assert weights.nonzero().flatten().tolist() == list(range(kept))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    logits=logits_of(),
    top_k=st.integers(1, 3000),
    top_p=st.floats(0.01, 1.0),
    shares=st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=8),
)
def test_tokens_are_those_up_to_which_the_share_lies(
    level: str, logits: Tensor, top_k: int, top_p: float, shares: list[float]
) -> None:
    top_k, kernels, count = min(top_k, len(logits)), kernels_at(level), len(shares)
    weights = kept_weights(kernels, logits, top_k, top_p).double()
    limits = Limits([top_k] * count, [top_p] * count)
    found = draw_tokens(kernels, logits[None], [0] * count, limits, torch.tensor(shares, dtype=torch.float64))
    sums = weights.cumsum(0)
    for share, token in zip(shares, found.tolist(), strict=True):
        assert weights[token] > 0
        assert float(sums[token]) >= share * float(sums[-1]) * (1 - ROUNDING)
        assert float(sums[token] - weights[token]) <= share * float(sums[-1]) * (1 + ROUNDING)


@pytest.mark.parametrize("level", LEVELS)
def test_each_token_has_its_own_row_and_limits(level: str) -> None:
    logits = torch.randn(5, 40_000, generator=torch.Generator().manual_seed(0))[:, 7:]
    places, kernels = [4, 0, 2, 2], kernels_at(level)
    limits = Limits([len(logits[0]), 40, 3, 1], [0.9, 1.0, 0.5, 1.0])
    shares = torch.tensor([0.1, 0.99, 0.5, 0.7], dtype=torch.float64)
    made = draw_tokens(kernels, logits, places, limits, shares).tolist()
    alone = [
        int(draw_tokens(kernels, logits[place][None], [0], Limits([top_k], [top_p]), shares[index, None]))
        for index, (place, top_k, top_p) in enumerate(zip(places, limits.top_k, limits.top_p, strict=True))
    ]
    assert made == alone
    assert made[3] == int(logits[2].argmax())
    assert made[2] in logits[2].topk(3).indices.tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (5, 0.9), (2, 1.0), (5, 0.0001)])
def test_where_no_token_is_possible_the_first_is_drawn(level: str, top_k: int, top_p: float) -> None:
    logits = torch.full((1, 5), IMPOSSIBLE)
    assert draw_tokens(kernels_at(level), logits, [0], Limits([top_k], [top_p]), torch.ones(1).double() * 0.7) == 0


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(logits=logits_of(), rows=st.integers(1, 5))
def test_log_sums_are_those_of_float64(level: str, logits: Tensor, rows: int) -> None:
    different = logits + torch.arange(rows).float().unsqueeze(1)
    made = log_sums(kernels_at(level), different)
    torch.testing.assert_close(made.double(), different.double().logsumexp(1), rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_the_log_sum_of_nothing_is_that_of_no_probability(level: str) -> None:
    assert log_sums(kernels_at(level), torch.full((1, 9), IMPOSSIBLE)).tolist() == [-math.inf]
