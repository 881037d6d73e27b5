"""What top_p leaves of a distribution, and draws by cumulated weights, against sums in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtforge.runtime.candidates import chosen_places, most_likely_kept, nucleus

ROUNDING = 1e-5


@st.composite
def logits_of(draw: st.DrawFn) -> Tensor:
    """Flat and steep distributions, some tokens impossible, some equally likely."""
    size = draw(st.integers(1, 3000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = torch.randn(size, generator=generator) * draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]))
    hidden = torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    hidden[draw(st.integers(0, size - 1))] = False
    return logits.masked_fill(hidden, float("-inf"))


@settings(max_examples=200)
@given(logits=logits_of(), top_p=st.floats(0.0, 0.999))
def test_the_nucleus_is_the_fewest_most_likely_tokens(logits: Tensor, top_p: float) -> None:
    candidates, weights = nucleus(logits, top_p)
    exact = logits.double().softmax(dim=0)
    torch.testing.assert_close(weights.double(), exact[candidates], rtol=1e-4, atol=1e-9)
    assert len(candidates) >= 1
    assert (candidates.diff() > 0).all()
    left_out = exact.clone()
    left_out[candidates] = 0.0
    assert float(left_out.max()) <= float(weights.min()) * (1 + ROUNDING)
    assert float(weights.double().sum()) >= top_p - ROUNDING
    assert float(weights.double().sum() - weights.min()) <= top_p + ROUNDING


def test_without_top_p_all_tokens_are_candidates_in_their_order() -> None:
    logits = torch.tensor([0.0, float("-inf"), 2.0])
    candidates, weights = nucleus(logits, 1.0)
    assert candidates.tolist() == [0, 1, 2]
    torch.testing.assert_close(weights, logits.softmax(0))


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_where_no_token_is_possible_one_is_chosen_all_the_same(top_p: float) -> None:
    candidates, weights = nucleus(torch.full((5,), float("-inf")), top_p)
    place = chosen_places(weights.unsqueeze(0), torch.tensor([0.7], dtype=torch.float64))
    assert int(candidates[place]) == 0


@settings(max_examples=200)
@given(
    rows=st.integers(1, 4),
    size=st.sampled_from([1, 2, 50, 1024, 1025, 2048, 5000]),
    zeros=st.sampled_from([0.0, 0.3, 0.999]),
    shares=st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_places_are_those_of_the_cumulated_weights(
    rows: int, size: int, zeros: float, shares: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, size, generator=generator)
    weights[torch.rand(rows, size, generator=generator) < zeros] = 0.0
    weights[:, int(torch.randint(size, (1,), generator=generator))] = 0.5
    found = chosen_places(weights, torch.tensor(shares[:rows], dtype=torch.float64)).tolist()
    for row, place in enumerate(found):
        sums = np.cumsum(weights[row].double().numpy())
        target = shares[row] * sums[-1]
        assert weights[row, place] > 0
        assert sums[place] >= target - 1e-9
        assert (sums[place - 1] if place else 0.0) <= target + 1e-9


def test_draws_have_the_distribution_of_the_weights() -> None:
    """Evenly spaced shares hit every place as often as its weight says."""
    weights = torch.rand(1, 3000, generator=torch.Generator().manual_seed(1)).square()
    count = 30_000
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = chosen_places(weights.expand(count, -1), shares)
    expected = weights[0].double() / weights.double().sum() * count
    assert (torch.bincount(found, minlength=3000) - expected).abs().max() <= 1


def test_top_p_counts_within_the_top_k_tokens() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]).log()
    candidates, weights = most_likely_kept(logits, torch.tensor([[2], [3]]), torch.tensor([[0.5], [1.0]]), 3)
    assert candidates.tolist() == [[0, 1, 2], [1, 2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[4 / 7, 0, 0], [2 / 9, 3 / 9, 4 / 9]]))


@given(
    rows=st.lists(
        st.lists(st.sampled_from([-math.inf, -3.5, -1.0, -0.0, 0.0, 2.0]), min_size=9, max_size=9), max_size=4
    ),
    top_k=st.integers(1, 9),
    most=st.integers(1, 9),
)
def test_of_equal_tokens_the_first_are_kept_whatever_others_ask_for(
    rows: list[list[float]], top_k: int, most: int
) -> None:
    most, logits = max(top_k, most), torch.tensor([*rows, [1.0] * 9])
    count = len(logits)
    candidates, weights = most_likely_kept(logits, torch.full((count, 1), top_k), torch.ones(count, 1), most)
    for row, found, kept in zip(logits.tolist(), candidates, weights, strict=True):
        likely = sorted(range(9), key=lambda token: (-row[token], token))[:top_k]
        assert set(found[kept > 0].tolist()) == {token for token in likely if row[token] > -math.inf}


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.9), (40, 0.9), (40, 1.0), (2000, 0.9)])
def test_the_last_bits_of_logits_change_few_draws(top_k: int | None, top_p: float) -> None:
    """Tokens that are nearly as likely as others may not change places."""
    generator = torch.Generator().manual_seed(0)
    changed = 0
    for share in torch.rand(400, generator=generator, dtype=torch.float64):
        exact = torch.randn(2000, generator=generator)
        drawn = []
        for logits in (exact, exact * (1 + 1e-3 * torch.randn(2000, generator=generator))):
            if top_k is None:
                candidates, weights = nucleus(logits, top_p)
            else:
                both = most_likely_kept(logits[None], torch.tensor([[top_k]]), torch.tensor([[top_p]]), top_k)
                candidates, weights = both[0][0], both[1][0]
            drawn.append(int(candidates[chosen_places(weights[None], share[None])]))
        changed += drawn[0] != drawn[1]
    assert changed < 36
