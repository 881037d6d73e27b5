"""LM heads that are screened: the likely tokens' logits are those of the whole product, whatever the weights are."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.converted import Families
from tests.runtime.kernel_levels import LEVELS, kernels_at
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from trtforge.core.features import FeaturesConfig
from trtforge.engine_process.requests import BeamParams, GenerationRequest, SamplingParams
from trtforge.models import kernels as kernel_choice
from trtforge.models.kernels import MOST_DRAWN
from trtforge.runtime.candidates import gumbel_noise
from trtforge.runtime.decoder import logits
from trtforge.runtime.decoder.logits import Head
from trtforge.runtime.drafting import NgramDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.linears.linear import NativeMatrix, native_matrix
from trtforge.runtime.native.screened import Screened
from trtforge.runtime.ranks.source import Source, open_engine, open_model
from trtforge.runtime.scheduling.random_numbers import random_bits

CASES = [
    (level, dtype, weights, by_products)
    for level in LEVELS
    for dtype in (torch.float32, torch.bfloat16)
    for weights in (torch.bfloat16, torch.float16)
    for by_products in (False, True)
    if not by_products or dtype is weights is torch.bfloat16
]


def screened(
    exact: NativeMatrix, inputs: int, padding: int = 0, first: int = 0, farthest: float = math.inf
) -> Screened:
    by_products, valid = exact.by_products, exact.layer.outputs - padding
    limits = {"valid": valid, "first": first, "farthest": farthest}
    return Screened(exact.kernels, exact.layer, inputs, by_products=by_products, **limits)  # type: ignore[arg-type]


def require_largest(made: Tensor, exact: Tensor, most: int) -> None:
    """The largest of each row, and what equals the last of them, are exact; the others are smaller."""
    for own, right in zip(made.float(), exact.float(), strict=True):
        largest = right >= right.topk(min(most, len(right))).values[-1]
        assert torch.equal(own[largest], right[largest])
        assert bool((own[~largest] < right[largest].min()).all())


@pytest.mark.parametrize(("level", "dtype", "weights", "by_products"), CASES)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    tiles=st.integers(1, 80),
    inputs=st.sampled_from([16, 48, 64, 256, 320]),
    most=st.sampled_from([1, 2, 20, 64]),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    outlier=st.sampled_from([0.0, 1.0, 300.0]),
    equal=st.integers(0, 5),
    padding=st.sampled_from([0, 0, 1, 40]),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_largest_products_are_those_of_the_layer(
    level: str, dtype: torch.dtype, weights: torch.dtype, by_products: bool, rows: int, tiles: int, inputs: int,
    most: int, spread: float, outlier: float, equal: int, padding: int, biased: bool, seed: int,
) -> None:  # fmt: skip
    """`spread`: of the lengths of the rows, in powers of e; `outlier`: a weight of each row, and an input; `equal` rows
    are the same; the last ones are `padding`, with large products."""
    generator, outputs = torch.Generator().manual_seed(seed), tiles * 32
    values = torch.randn(outputs, inputs, generator=generator)
    values *= torch.randn(outputs, 1, generator=generator).mul(spread).exp()
    values[:, 3] += outlier * torch.randn(outputs, generator=generator)
    values[torch.randint(outputs, (equal,), generator=generator)] = values[0].clone()
    values[max(1, outputs - padding) :] *= 100
    x = torch.randn(rows, inputs, generator=generator)
    x[:, 3] += outlier
    bias = torch.randn(outputs, generator=generator) if biased else None
    kernels = kernels_at(level)
    by_products = by_products and kernels.multiplies
    exact = native_matrix(kernels, values.to(weights), bias, by_products=by_products)
    valid = max(1, outputs - padding)
    head, x = screened(exact, inputs, outputs - valid), x.to(dtype)
    expected = exact(x)
    for _ in range(2):
        assert torch.equal(head(x), expected)
        head.need(most)
        require_largest(head(x)[:, :valid], expected[:, :valid], most)
        head.need(0)


@pytest.mark.parametrize(("level", "dtype", "weights", "by_products"), CASES)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    tiles=st.integers(1, 80),
    inputs=st.sampled_from([16, 64, 320]),
    first=st.sampled_from([0, 4096]),
    factors=st.lists(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0, 1e4]), min_size=4, max_size=4),
    most=st.sampled_from([1, 20]),
    outlier=st.sampled_from([0.0, 300.0]),
    padding=st.sampled_from([0, 40]),
    seed=st.integers(0, 2**16),
)
def test_the_largest_sum_with_noise_is_that_of_the_layer(
    level: str, dtype: torch.dtype, weights: torch.dtype, by_products: bool, rows: int, tiles: int, inputs: int,
    first: int, factors: list[float], most: int, outlier: float, padding: int, seed: int,
) -> None:  # fmt: skip
    """Of rows with a factor; of the others the largest products are. Sums are as the sampler has them."""
    generator, outputs = torch.Generator().manual_seed(seed), tiles * 32
    values = torch.randn(outputs, inputs, generator=generator)
    values[:, 3] += outlier * torch.randn(outputs, generator=generator)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    kernels = kernels_at(level)
    exact = native_matrix(kernels, values.to(weights), None, by_products=by_products and kernels.multiplies)
    valid = max(1, outputs - padding)
    head, expected = screened(exact, inputs, outputs - valid, first), exact(x)[:, :valid]
    keys = random_bits([(seed, row) for row in range(min(rows, MOST_DRAWN))])
    numbers = np.array(factors[: len(keys)])
    head.need(0 if rows > MOST_DRAWN else most, keys, numbers)
    made = head(x)[:, :valid]
    if rows > MOST_DRAWN:
        assert torch.equal(made, expected)
        return
    noise = gumbel_noise(torch.from_numpy(keys.view(np.int64)), first + valid)[:, first:]
    for row, factor in enumerate(factors[:rows]):
        if not factor:
            require_largest(made[row : row + 1], expected[row : row + 1], most)
        else:
            sums, right = (logits[row].float() * factor + noise[row] for logits in (made, expected))
            assert int(sums.argmax()) == int(right.argmax())
            assert made[row, sums.argmax()] == expected[row, sums.argmax()]
    head.need(most)  # nothing is left of the factors
    require_largest(head(x)[:, :valid], expected, most)


@pytest.mark.parametrize(("level", "dtype", "weights", "by_products"), CASES)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 3),
    tiles=st.integers(1, 80),
    distances=st.lists(st.sampled_from([0.0, 1e-3, 0.5, 3.0, 60.0]), min_size=3, max_size=3),
    factor=st.sampled_from([0.0, 1.0]),
    outlier=st.sampled_from([0.0, 300.0]),
    padding=st.sampled_from([0, 40]),
    seed=st.integers(0, 2**16),
)
def test_products_near_the_largest_are_those_of_the_layer(
    level: str, dtype: torch.dtype, weights: torch.dtype, by_products: bool, rows: int, tiles: int,
    distances: list[float], factor: float, outlier: float, padding: int, seed: int,
) -> None:  # fmt: skip
    """All others are farther below it. The last row draws from all tokens, if it has a factor."""
    generator, outputs = torch.Generator().manual_seed(seed), tiles * 32
    values = torch.randn(outputs, 64, generator=generator)
    values[:, 3] += outlier * torch.randn(outputs, generator=generator)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    kernels = kernels_at(level)
    exact = native_matrix(kernels, values.to(weights), None, by_products=by_products and kernels.multiplies)
    valid = max(1, outputs - padding)
    head, expected = screened(exact, 64, outputs - valid), exact(x)[:, :valid].float()
    below = np.array(distances[:rows])
    factors = np.zeros(rows)
    if factor:
        factors[-1], below[-1] = factor, 0.0
    head.need(1, random_bits([(seed, row) for row in range(rows)]), factors, below)
    made = head(x)[:, :valid].float()
    for row, distance in enumerate(below):
        if not factors[row]:
            near = expected[row] >= expected[row].max() - distance
            assert torch.equal(made[row, near], expected[row, near])
            assert bool((made[row, ~near] < expected[row].max() - distance).all())


@pytest.mark.parametrize("level", LEVELS)
def test_few_tiles_are_computed_for_tokens_near_the_likeliest(level: str) -> None:
    torch.manual_seed(0)
    exact = native_matrix(kernels_at(level), torch.randn(32 * 500, 256).bfloat16() / 16, None, by_products=False)
    head, x = screened(exact, 256), torch.randn(1, 256).bfloat16()
    head.need(1, np.zeros(1, dtype=np.uint64), np.zeros(1), np.array([0.5]))
    made, expected = head(x).float(), exact(x).float()
    changed = (made != expected).view(-1, 32).any(1)
    assert 0 < int((~changed).sum()) < 60
    assert torch.equal(made[expected >= expected.max() - 0.5], expected[expected >= expected.max() - 0.5])


@pytest.mark.parametrize("level", LEVELS)
def test_few_tiles_are_computed_for_a_draw_from_a_large_vocabulary(level: str) -> None:
    torch.manual_seed(0)
    exact = native_matrix(kernels_at(level), torch.randn(32 * 500, 256).bfloat16() / 16, None, by_products=False)
    head, x = screened(exact, 256), torch.randn(1, 256).bfloat16()
    places = set()
    for key in range(20):
        head.need(1, np.array([key], dtype=np.uint64), np.ones(1))
        made, expected = head(x).float(), exact(x).float()
        noise = gumbel_noise(torch.tensor([key]), 32 * 500)
        place = int((made + noise).argmax())
        assert place == int((expected + noise).argmax())
        places.add(place)
        assert 0.02 < float((made == expected).float().mean()) < 0.6
    assert len(places) == 20


@pytest.mark.parametrize("level", LEVELS)
def test_few_tiles_are_computed_of_a_large_vocabulary(level: str) -> None:
    """Elsewhere the products are those of the codes, which are near."""
    torch.manual_seed(0)
    exact = native_matrix(kernels_at(level), torch.randn(32 * 500, 256).bfloat16(), None, by_products=False)
    head, x = screened(exact, 256), torch.randn(1, 256).bfloat16()
    head.need(1)
    made, expected = head(x).float(), exact(x).float()
    require_largest(made, expected, 1)
    assert 0.02 < float((made == expected).float().mean()) < 0.6
    assert float((made - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sign", [1, -1])
def test_all_products_are_computed_where_a_likely_one_is_too_far(level: str, sign: int) -> None:
    """A cap of logits would make it equal to others."""
    torch.manual_seed(0)
    x = torch.randn(1, 256).bfloat16()
    values = sign * torch.randn(32 * 500, 256).abs() * x.sign().float()  # all products have this sign
    exact = native_matrix(kernels_at(level), values.bfloat16(), None, by_products=False)
    likeliest = float(exact(x).max())
    for factor, whole in ((0.95, True), (1.05, False)):
        head = screened(exact, 256, farthest=abs(likeliest) * factor)
        head.need(1)
        assert torch.equal(head(x), exact(x)) is whole


def test_a_cap_says_how_far_logits_may_be(families: Families, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the cap, of logits after their scale."""
    monkeypatch.setattr(kernel_choice, "_SCREENED_BYTES", 0)
    monkeypatch.setattr(kernel_choice, "suits_cpu", lambda outputs, inputs: True)
    found = []
    monkeypatch.setattr(logits, "Screened", lambda *_, farthest, **__: found.append(farthest))
    linear = mock.Mock(spec=NativeMatrix, by_products=False, layer=None, kernels=None)
    spec = open_model(families("gemma2").checkpoint()).spec(0)
    for changes in ({}, {"logit_scale": 0.5}, {"logit_cap": None}):
        logits._screened(linear, replace(spec, **changes))
    assert found == [9.0, 18.0, math.inf]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("what", ["zeros", "not a number", "infinite"])
def test_inputs_that_tell_nothing_give_the_whole_product(level: str, what: str) -> None:
    torch.manual_seed(0)
    exact = native_matrix(kernels_at(level), torch.randn(32 * 40, 64).bfloat16(), None, by_products=False)
    head, x = screened(exact, 64), torch.randn(2, 64).bfloat16()
    x[1, 5] = {"zeros": 0.0, "not a number": float("nan"), "infinite": float("inf")}[what]
    x = x * 0 if what == "zeros" else x
    head.need(1)
    for _ in range(5):  # some of them while no product is screened
        torch.testing.assert_close(head(x), exact(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_codes_cannot_hold_are_always_computed(level: str) -> None:
    """Infinite ones, and such as are smaller than any code."""
    torch.manual_seed(0)
    values = torch.randn(32 * 40, 64).bfloat16()
    values[70, 3], values[100] = float("inf"), 0.0
    values[200] *= 1e-35
    exact = native_matrix(kernels_at(level), values, None, by_products=False)
    head, x = screened(exact, 64), torch.randn(1, 64).bfloat16().abs()
    head.need(1)
    made, expected = head(x).float(), exact(x).float()
    assert made[0, 70] == expected[0, 70] == float("inf")
    assert int(made.argmax()) == 70


@pytest.mark.parametrize("level", LEVELS)
def test_products_that_are_equal_once_rounded_are_all_computed(level: str) -> None:
    """Of codes they are two units of bfloat16's last place apart, each near the end of what its errors allow."""
    values = torch.zeros(32 * 40, 16)
    values[0], values[32] = 126.125, 126.875
    values[[0, 32], 0] = 127.0
    exact = native_matrix(kernels_at(level), values.half(), None, by_products=False)
    head, x = screened(exact, 16), torch.full((1, 16), 0.01068115234375, dtype=torch.bfloat16)
    head.need(1)
    made, expected = head(x), exact(x)
    assert expected[0, 0] == expected[0, 32]
    require_largest(made, expected, 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("weights", "inputs"), [(1e-22, 1.0), (1e-28, 1e20), (1.0, 1e-24)])
def test_numbers_whose_squares_are_none_screen_nothing_out_that_is_likely(
    level: str, weights: float, inputs: float
) -> None:
    torch.manual_seed(0)
    values, x = torch.randn(32 * 200, 64) * weights, torch.randn(12, 64) * inputs
    exact = native_matrix(kernels_at(level), values.bfloat16(), None, by_products=False)
    for row in x.split(1):
        head = screened(exact, 64)
        head.need(20)
        require_largest(head(row), exact(row), 20)


CHOICES = {
    "greedy": SamplingParams(),
    "few": SamplingParams(top_k=5, temperature=0.7, seed=3),
    "few of few": SamplingParams(top_k=20, top_p=0.8, temperature=1.4, seed=1),
    "many": SamplingParams(top_k=2**70, seed=4),
    "nearly equal": SamplingParams(top_k=5, temperature=1e8, seed=0),
    "nucleus": SamplingParams(top_p=0.9, temperature=1.2, seed=2),
    "all": SamplingParams(top_p=1.0, seed=5),
    "all of steep": SamplingParams(top_p=1.0, temperature=0.2, seed=6),
    "all and fewer": SamplingParams(top_p=1.0, top_p_decay=0.8, seed=7),
    "near": SamplingParams(top_p=1.0, min_p=0.2, temperature=0.9, seed=8),
    "near and few": SamplingParams(top_p=0.9, top_k=2**60, min_p=0.02, seed=9),
    "scored": SamplingParams(return_log_probs=True, top_log_probs=3),
    "scored prompt": SamplingParams(prompt_log_probs=True),
    "penalised": SamplingParams(repetition_penalty=1.3),
    "not yet": SamplingParams(min_tokens=4),
}


def test_candidates_are_few_tokens_that_weights_tell_apart() -> None:
    few = SamplingParams(top_k=20, temperature=1.4)
    assert few.candidates == 20
    assert replace(few, temperature=1e8).candidates == replace(few, top_k=2**70).candidates == 0
    assert (SamplingParams().candidates, SamplingParams(temperature=0.0, top_k=2**70).candidates) == (1, 1)
    assert SamplingParams(top_k=1, temperature=1e8).candidates == 1
    drawn = SamplingParams(top_p=1.0, temperature=1e8)
    assert (drawn.candidates, drawn.draws_from_all) == (1, True)
    near = SamplingParams(top_p=0.9, min_p=0.1)
    assert (near.candidates, near.draws_near, near.draws_from_all) == (1, True, False)
    assert (replace(near, top_k=5).candidates, replace(near, top_k=5).draws_near) == (5, False)
    assert not replace(near, temperature=1e8).draws_near
    assert not replace(near, top_p=None).draws_near
    for changes in (
        {"top_p": 0.9},
        {"top_p_decay": 0.9},
        {"top_k": 2**70},
        {"min_tokens": 1},
        {"return_log_probs": True},
    ):
        assert replace(drawn, **changes).candidates == 0
    assert not any(p.draws_from_all for p in (SamplingParams(), SamplingParams(top_p=1.0, temperature=0.0), few))


def asked(prompts: list[list[int]], vocabulary: int) -> list[list[GenerationRequest]]:
    """Requests that read many or few logits, by themselves, and together. Ids become their places."""
    alone = [
        GenerationRequest(f"{name} {index}", tuple(prompts[index % len(prompts)]), 10, sampling, end_ids=(7,))
        for index, (name, sampling) in enumerate(CHOICES.items(), start=-1)
    ]
    first = GenerationRequest("first", tuple(prompts[3]), 6, CHOICES["greedy"])
    copy = replace(first, sampling=CHOICES["scored"], copy_of="0")
    drawn = [replace(first, sampling=CHOICES["all"]), replace(first, sampling=CHOICES["all of steep"], copy_of="0")]
    mixed = [replace(first, sampling=CHOICES[name], max_tokens=9) for name in ("all", "greedy", "few of few")]
    near = [replace(first, sampling=CHOICES[name], max_tokens=9) for name in ("near", "near and few", "all")]
    bias = SamplingParams(embedding_bias=tuple(float(token % 7) for token in range(vocabulary)))
    others = [
        replace(first, sampling=bias),
        replace(first, bad_words=((5,), (9,))),
        replace(first, generation_logits=True),
        replace(first, context_logits=True),
        replace(first, beams=BeamParams(3, 2)),
        replace(first, prompt=(5, 6, 7, 8) * 6, max_tokens=20),
    ]
    near.append(replace(near[0], sampling=CHOICES["all"], copy_of="0"))
    together = [[first, copy], drawn, mixed[:2], mixed, near[:2], near[1:3], near[::3], [first, copy, *alone, *others]]
    return [*([each] for each in (*alone, *others)), *together]


@contextmanager
def ranks_of(source: Source) -> Iterator[KeptRanks]:
    ranks = KeptRanks(source, 200)
    yield ranks
    ranks.end()


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_requests_get_what_they_get_without_a_screen(
    tp: int, drafts: bool, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(vocab_size=4097 - tp)  # the last of two ranks has a token less
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(tp=tp))
    found = open_engine(
        write_engine(checkpoint, tmp_path / "engine", dtype="bfloat16", max_batch_size=24, max_beam_width=3)
    )
    features = FeaturesConfig(context_logits=True, generation_logits=True)
    source = replace(found, forge=found.forge.model_copy(update={"features": features}))
    needed: set[tuple[int, int]] = set()
    need = Head.need
    monkeypatch.setattr(
        Head, "need", lambda head, most, draws: (needed.add((most, len(draws))), need(head, most, draws))[1]
    )
    made = []
    for least in (kernel_choice._SCREENED_BYTES, 0):
        monkeypatch.setattr(kernel_choice, "_SCREENED_BYTES", least)
        with ranks_of(source) as ranks:
            for requests in asked(prompts, 4097 - tp):
                drafter = NgramDrafter(NGRAMS) if drafts else None
                with Engine(source, ranks, EngineOptions(kv_reuse=False), drafter) as engine:  # type: ignore[arg-type]
                    made.append(generate_with(engine, requests))
    half = len(made) // 2
    assert [each.error for some in made for each in some if each.error is not None] == []
    assert made[half:] == made[:half]
    alone = {(0, 0), (1, 0), (5, 0), (20, 0), (1, 3), (1, 6), (20, 9)}
    assert alone - needed == set()
