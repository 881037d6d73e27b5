"""Draws by the kernels, with every set of instructions, against sums and sorts in float64."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.kernel_levels import LEVELS, kernels_at
from trtforge.runtime.candidates import drawn_of_all, gumbel_noise
from trtforge.runtime.native.sampling import Limits, draw_tokens, kept_weights, log_sums
from trtforge.runtime.scheduling.random_numbers import random_bits

ROUNDING = 1e-5
IMPOSSIBLE = float("-inf")
LEAST = 1e-37
"""Less likely tokens, beside the most likely one, have no weight."""


def keys_of(shares: list[float]) -> Tensor:
    """Random bits that stand for these numbers in [0, 1)."""
    bits = [int(share * 2**53) << 11 for share in shares]
    return torch.tensor([each - (1 << 64) if each >> 63 else each for each in bits])


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
@given(logits=logits_of(), min_p=st.sampled_from([1e-40, 1e-30, 0.01, 0.3, 1.0]), top_k=st.integers(1, 3000))
def test_min_p_leaves_what_is_likely_enough_beside_the_most_likely(
    level: str, logits: Tensor, min_p: float, top_k: int
) -> None:
    weights = kept_weights(kernels_at(level), logits, len(logits), 1.0, min_p).double()
    exact = (logits - logits.max()).double().exp()
    kept = weights > 0
    torch.testing.assert_close(weights[kept], exact[kept], rtol=1e-6, atol=0.0)
    assert float(exact[kept].min()) >= min_p * (1 - ROUNDING)
    assert float(exact[~kept].max() if len(exact[~kept]) else 0.0) <= max(min_p, LEAST) * (1 + ROUNDING)
    fewest = kept_weights(kernels_at(level), logits, min(top_k, len(logits)), 1.0, min_p) > 0
    assert int(fewest.sum()) == min(top_k, int(kept.sum()))
    assert not (fewest & ~kept).any()


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
    top_p=st.floats(0.01, 1.0, exclude_max=True),
    shares=st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=8),
)
def test_tokens_are_those_up_to_which_the_share_lies(
    level: str, logits: Tensor, top_k: int, top_p: float, shares: list[float]
) -> None:
    top_k, kernels, count = min(top_k, len(logits)), kernels_at(level), len(shares)
    weights = kept_weights(kernels, logits, top_k, top_p).double()
    limits = Limits([top_k] * count, [top_p] * count)
    found = draw_tokens(kernels, logits[None], [0] * count, limits, keys_of(shares))
    sums = weights.cumsum(0)
    for share, token in zip(shares, found.tolist(), strict=True):
        assert weights[token] > 0
        assert float(sums[token]) >= share * float(sums[-1]) * (1 - ROUNDING)
        assert float(sums[token] - weights[token]) <= share * float(sums[-1]) * (1 + ROUNDING)


def noise_of(key: int, vocabulary: int) -> npt.NDArray[np.float64]:
    """source/gumbel.h, from the quantiles on in float64."""
    h = np.arange(vocabulary, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key & 0xFFFFFFFF)
    for shifts, factors, more in (
        ((16, 13, 16), (0x85EBCA6B, 0xC2B2AE35), key >> 32),
        ((16, 15, 16), (0x7FEB352D, 0x846CA68B), 0),
    ):
        h = (h ^ (h >> np.uint32(shifts[0]))) * np.uint32(factors[0])
        h = (h ^ (h >> np.uint32(shifts[1]))) * np.uint32(factors[1])
        h = (h ^ (h >> np.uint32(shifts[2]))) + np.uint32(more)
    quantiles = np.minimum((h.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-quantiles.astype(np.float64)))
    return noise


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    logits=logits_of(),
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6),
    min_p=st.sampled_from([None, 0.0, 1e-30, 0.05, 1.0]),
)
def test_of_all_tokens_that_with_the_largest_sum_of_logit_and_noise_is_drawn(
    level: str, logits: Tensor, keys: list[int], min_p: float | None
) -> None:
    bits = torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))
    limits = Limits([len(logits)] * len(keys), [1.0] * len(keys), min_p if min_p is None else [min_p] * len(keys))
    found = draw_tokens(kernels_at(level), logits[None], [0] * len(keys), limits, bits)
    noise = gumbel_noise(bits, len(logits))
    for key, token, other in zip(keys, found.tolist(), noise.double().numpy(), strict=True):
        exact = noise_of(key, len(logits))
        np.testing.assert_allclose(other, exact, rtol=2e-6, atol=2e-6)
        beside = (logits - logits.max()).double().numpy()
        sums = np.where(beside >= math.log(min_p or 1e-300) + ROUNDING * (min_p != 1), beside + exact, IMPOSSIBLE)
        assert beside[token] + exact[token] >= sums.max() - 1e-5
        assert beside[token] >= math.log(min_p or 1e-300) - ROUNDING
    expected = (logits - logits.max() + noise).argmax(1)
    assert drawn_of_all(logits.repeat(len(keys), 1), bits).tolist() == expected.tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_draws_of_all_tokens_have_their_distribution(level: str) -> None:
    """By chi-square, of the keys that seeds and positions give: p = 0.001."""
    logits = torch.tensor([0.0, 1.0, IMPOSSIBLE, -2.0, 1.5, *[-1.0] * 32, 0.5])
    bits = torch.from_numpy(random_bits([(seed, step) for seed in range(200) for step in range(200)]).view(np.int64))
    count = len(bits)
    limits = Limits([len(logits)] * count, [1.0] * count)
    made = torch.bincount(
        draw_tokens(kernels_at(level), logits[None], [0] * count, limits, bits), minlength=len(logits)
    )
    expected = logits.double().softmax(0) * count
    assert made[2] == 0
    possible = expected > 0
    chi_square = float(((made - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < 66.6  # 36 degrees of freedom


@pytest.mark.parametrize("level", LEVELS)
def test_large_logits_are_drawn_by_their_differences(level: str) -> None:
    """Beside which noise would be rounded away, and infinite ones."""
    bits = torch.from_numpy(random_bits([(seed, 0) for seed in range(400)]).view(np.int64))
    limits = Limits([40] * 400, [1.0] * 400)
    logits = torch.full((1, 40), -3e8)
    logits[0, [3, 30]] = 3e8
    for made in (
        draw_tokens(kernels_at(level), logits, [0] * 400, limits, bits),
        drawn_of_all(logits.expand(400, -1), bits),
    ):
        assert 150 < int((made == 3).sum()) < 250
        assert int((made == 3).sum() + (made == 30).sum()) == 400
    logits[0, 30] = math.inf
    assert set(draw_tokens(kernels_at(level), logits, [0] * 400, limits, bits).tolist()) == {30}
    assert set(drawn_of_all(logits.expand(400, -1), bits).tolist()) == {30}


def test_noise_of_neighbours_is_independent() -> None:
    """Of tokens, positions and seeds; the quantiles are uniform."""
    noise = gumbel_noise(
        torch.from_numpy(random_bits([(seed, step) for seed in range(60) for step in range(60)]).view(np.int64)), 50
    ).double()
    quantiles = (-(-noise).exp()).exp().reshape(60, 60, 50) - 0.5
    count = quantiles.numel()
    assert abs(float(quantiles.mean())) < 4 * (1 / 12 / count) ** 0.5
    assert float((quantiles**2).mean()) == pytest.approx(1 / 12, abs=4 * (1 / 180 / count) ** 0.5)
    for axis in range(3):
        product = (
            quantiles.narrow(axis, 1, quantiles.shape[axis] - 1) * quantiles.narrow(axis, 0, quantiles.shape[axis] - 1)
        ).mean()
        assert abs(float(product)) < 4 / 12 / (0.98 * count) ** 0.5


@pytest.mark.parametrize("level", LEVELS)
def test_each_token_has_its_own_row_and_limits(level: str) -> None:
    logits = torch.randn(5, 40_000, generator=torch.Generator().manual_seed(0))[:, 7:]
    places, kernels = [4, 0, 2, 2], kernels_at(level)
    limits = Limits([len(logits[0]), 40, 3, 1], [0.9, 1.0, 0.5, 1.0], [0.3, 0.0, 0.01, 1.0])
    given = limits.top_k, limits.top_p, limits.min_p or ()
    keys = keys_of([0.1, 0.99, 0.5, 0.7])
    made = draw_tokens(kernels, logits, places, limits, keys).tolist()
    alone = [
        int(draw_tokens(kernels, logits[place][None], [0], Limits([top_k], [top_p], [min_p]), keys[index, None]))
        for index, (place, top_k, top_p, min_p) in enumerate(zip(places, *given, strict=True))
    ]
    assert made == alone
    assert made[3] == int(logits[2].argmax())
    assert made[2] in logits[2].topk(3).indices.tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("min_p", [None, [0.1], [1.0]])
@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (5, 0.9), (2, 1.0), (5, 0.0001)])
def test_where_no_token_is_possible_the_first_is_drawn(
    level: str, top_k: int, top_p: float, min_p: list[float] | None
) -> None:
    logits = torch.full((1, 5), IMPOSSIBLE)
    assert draw_tokens(kernels_at(level), logits, [0], Limits([top_k], [top_p], min_p), keys_of([0.7])) == 0


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
