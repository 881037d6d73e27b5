"""Intervals of a verification's figures, and whether a difference of two verifications is real."""

import numpy as np
import pytest
import torch

from trtforge.verify.bootstrap import (
    divergence_difference,
    divergence_interval,
    percentile_99,
    percentile_interval,
    perplexity_difference,
    perplexity_interval,
)
from trtforge.verify.comparison import Comparison
from trtforge.verify.result import Blocks

BLOCKS, TOKENS = 200, 64


def blocks(added: float, spread: float, seed: int = 0) -> Blocks:
    """A candidate whose likelihood is worse by `added` a token, with noise of `spread` in each block's mean."""
    random = np.random.default_rng(seed)
    reference = TOKENS * random.normal(3.0, 1.0, BLOCKS)
    candidate = reference + TOKENS * (added + spread * random.normal(size=BLOCKS))
    divergence = TOKENS * (added + spread * random.normal(size=BLOCKS))
    return Blocks(
        tokens=(TOKENS,) * BLOCKS,
        reference=tuple(reference),
        candidate=tuple(candidate),
        divergence=tuple(divergence),
    )


def test_intervals_are_as_wide_as_the_mean_of_blocks_varies() -> None:
    found = blocks(0.05, 0.1)
    width = 2 * 1.96 * 0.1 / BLOCKS**0.5
    divergence, perplexity = divergence_interval(found), perplexity_interval(found)
    assert divergence is not None
    assert perplexity is not None
    assert divergence.high - divergence.low == pytest.approx(width, rel=0.15)
    assert np.log1p(perplexity.high) - np.log1p(perplexity.low) == pytest.approx(width, rel=0.15)
    assert perplexity.low < np.expm1(np.subtract(found.candidate, found.reference).mean() / TOKENS) < perplexity.high


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(100):
        found = divergence_interval(blocks(0.05, 0.1, seed))
        assert found is not None
        covered += found.low <= 0.05 <= found.high
    assert 88 <= covered <= 100


def test_pairs_show_a_difference_that_separate_intervals_hide() -> None:
    one = blocks(0.05, 0.1)
    # The candidates share what makes a block hard; one is worse by a little in each block.
    other = one.model_copy(
        update={
            "candidate": tuple(nll + 0.004 * TOKENS for nll in one.candidate),
            "divergence": tuple(value + 0.004 * TOKENS for value in one.divergence),
        }
    )
    alone, worse = divergence_interval(one), divergence_interval(other)
    assert alone is not None
    assert worse is not None
    assert worse.low < alone.high
    real, noise = perplexity_difference(one, other), perplexity_difference(one, one)
    assert real is not None
    assert noise is not None
    assert (real.excludes_zero, noise.excludes_zero) == (True, False)
    assert real.low == pytest.approx(np.expm1(0.004))
    difference = divergence_difference(one, other)
    assert difference is not None
    assert difference.low == pytest.approx(0.004)


def test_the_same_blocks_have_the_same_interval_in_every_run() -> None:
    assert divergence_interval(blocks(0.05, 0.1)) == divergence_interval(blocks(0.05, 0.1))


def test_few_blocks_have_no_interval() -> None:
    few = Blocks(tokens=(9,) * 7, reference=(1.0,) * 7, candidate=(1.0,) * 7, divergence=(0.5,) * 7)
    assert (divergence_interval(few), perplexity_interval(few), perplexity_difference(few, few)) == (None,) * 3


def test_the_99th_percentile_and_its_interval() -> None:
    values = np.random.default_rng(1).exponential(size=BLOCKS * TOKENS)
    assert (values > percentile_99(values)).mean() == pytest.approx(0.01, abs=1e-4)
    found = percentile_interval(values, np.repeat(np.arange(BLOCKS), TOKENS), blocks(0.0, 0.0))
    assert found is not None
    assert found.low < percentile_99(values) < found.high
    assert found.low == pytest.approx(np.log(100), abs=0.5)
    assert 0.1 < found.high - found.low < 1.0


def test_reference_text_is_recognised_by_its_likelihoods() -> None:
    assert blocks(0.0, 0.1).same_text(blocks(0.3, 0.2))
    assert not blocks(0.0, 0.1).same_text(blocks(0.0, 0.1, seed=1))


def comparison(windows: int, length: int, noise: float) -> Comparison:
    generator, found = torch.Generator().manual_seed(0), Comparison()
    for _ in range(windows):
        logits = torch.randn(length, 30, generator=generator)
        other = logits + noise * torch.randn(length, 30, generator=generator)
        found.add(logits, other, torch.randint(0, 30, (length,), generator=generator))
    return found


def test_blocks_add_up_to_the_totals() -> None:
    found = comparison(5, 151, 0.2)
    assert found.blocks.tokens == (64, 64, 22) * 5
    assert sum(found.blocks.reference) == pytest.approx(found.reference_nll)
    assert sum(found.blocks.divergence) == pytest.approx(found.divergence)
    divergences = found.divergences
    assert divergences.mean_interval is not None
    assert divergences.mean_interval.low < divergences.mean < divergences.mean_interval.high
    assert divergences.mean < divergences.p99


def test_many_blocks_become_longer_ones() -> None:
    found = comparison(600, 65, 0.1)
    assert len(found.blocks.tokens) == 300
    assert set(found.blocks.tokens) == {128}


def test_rounding_noise_of_equal_models_is_no_negative_divergence() -> None:
    found = comparison(9, 33, 1e-6)
    found.divergence = -6e-10 * found.tokens
    assert found.divergences.mean == 0.0
    assert 0.0 <= found.divergences.p99 < 1e-6
