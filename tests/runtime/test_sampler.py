import tracemalloc
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trtforge.engine_process.requests import GenerationRequest, SamplingParams
from trtforge.runtime.repeated_ngrams import RepeatedNgrams
from trtforge.runtime.sampler import Sampler
from trtforge.runtime.scheduling.random_numbers import uniform
from trtforge.runtime.scheduling.sequence import Sequence

VOCAB = 50


def sequence(params: SamplingParams, prompt: Several[int] = (1, 2, 3), **changes: Any) -> Sequence:
    request = replace(GenerationRequest("r", tuple(prompt), 100, params), **changes)
    return Sequence.of(request, 0, 9000, lambda output: None)


KINDS = ("kernels", "torch", "gpu")


def sampler_of(kind: str) -> Sampler:
    """On the CPU by its kernels or by torch's operations, or by what a GPU does."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    assert sampler._kernels is not None
    if kind != "kernels":
        sampler._kernels = None
    sampler._sorts = kind == "gpu"
    return sampler


def drawn(params: SamplingParams, logits: Tensor, count: int = 4000, kind: str = "kernels") -> Tensor:
    """Share of each token over many seeds."""
    rows = [sequence(replace(params, seed=seed)) for seed in range(count)]
    sampler = sampler_of(kind)
    tokens = sampler.sample(rows, logits.repeat(count, 1)).tokens
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB) / count


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.7), True),
        (SamplingParams(top_k=1, top_p=0.9), True),
        (SamplingParams(temperature=0.0, top_k=40), True),
        (SamplingParams(top_k=0, top_p=0.0), True),
        (SamplingParams(top_k=2), False),
        (SamplingParams(top_p=0.5), False),
    ],
)
def test_without_top_k_and_top_p_the_most_likely_token_is_taken(params: SamplingParams, greedy: bool) -> None:
    assert params.greedy is greedy


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(top_p=0.97, temperature=1.2),
        SamplingParams(top_k=10, top_p=0.6, temperature=1.7),
        SamplingParams(top_p=1.0, temperature=0.5),
        SamplingParams(top_p=1.0, min_p=0.1),
        SamplingParams(top_k=6, min_p=0.3),
        SamplingParams(top_p=0.7, min_p=0.05, temperature=1.4),
        SamplingParams(top_p=0.9, min_p=1.0),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_draws_follow_the_distribution_of_transformers(kind: str, params: SamplingParams) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    warpers = LogitsProcessorList([MinPLogitsWarper(params.min_p)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p:
        warpers.append(TopPLogitsWarper(params.top_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits / (params.temperature or 1.0)).softmax(1)[0]
    count = 10_000
    shares = drawn(params, logits, count, kind)
    possible = expected > 0
    assert shares[~possible].sum() == 0
    often = expected * count >= 5  # the others make one class, if there are any
    made, wanted = ([*s[often].tolist(), float(s[possible & ~often].sum())] for s in (shares, expected))
    classes = [(got, share) for got, share in zip(made, wanted, strict=True) if share]
    chi_square = count * sum((got - share) ** 2 / share for got, share in classes)
    freedom = len(classes) - 1
    if freedom:  # else one token alone is possible
        bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert chi_square < bound  # p = 0.001, by Wilson and Hilferty


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_different_parameters_draws_what_each_row_draws_alone(kind: str) -> None:
    params = [
        SamplingParams(),
        SamplingParams(top_k=3, seed=5),
        SamplingParams(top_p=0.7, temperature=2.0, seed=6),
        SamplingParams(top_k=20, repetition_penalty=1.3, presence_penalty=0.4, seed=7),
        SamplingParams(frequency_penalty=0.8, return_log_probs=True),
        *(SamplingParams(top_p=0.1 * at, temperature=3.0, seed=at) for at in range(1, 20)),
    ]
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(1))
    together = sampler_of(kind).sample([sequence(p) for p in params], logits.clone())
    alone = [sampler_of(kind).sample([sequence(p)], logits[i : i + 1].clone()).tokens[0] for i, p in enumerate(params)]
    assert together.tokens == alone


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    prompt = (4, 9, 9, 17)
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt]), logits.clone())
    changed = logits.clone()
    Sampler(VOCAB, torch.device("cpu")).sample([sequence(SamplingParams(repetition_penalty=1.8), prompt)], changed)
    torch.testing.assert_close(changed, expected)


def test_presence_counts_a_token_once_and_frequency_every_time() -> None:
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    Sampler(VOCAB, torch.device("cpu")).sample([sequence(params, (7, 7, 7, 8))], logits)
    assert (logits[0, 7], logits[0, 8], logits[0, 9]) == (-1.25, -0.75, 0.0)


def test_ignored_tokens_of_the_prompt_count_for_the_repetition_penalty_only() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, prompt_ignore_length=3
    )
    logits, row = torch.ones(2, VOCAB), sequence(params, (7, 7, 9, 7, 8))
    row.tokens += [9, 9]
    short = sequence(replace(params, prompt_ignore_length=30), (7,))
    short.tokens += [8]
    Sampler(VOCAB, torch.device("cpu")).sample([row, short], logits)
    assert logits[0, [7, 8, 9, 10]].tolist() == [0.5 - 0.75, 0.5 - 0.75, 0.5 - 1.0, 1.0]
    assert logits[1, [7, 8, 9]].tolist() == [0.5, 0.5 - 0.75, 1.0]


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=24), size=st.integers(1, 5), cut=st.integers(1, 24))
def test_repeated_ngrams_are_banned_as_transformers_does(tokens: list[int], size: int, cut: int) -> None:
    """Whether the sequence grew meanwhile, or has become another beam."""
    sampler, row = Sampler(VOCAB, torch.device("cpu")), sequence(SamplingParams(no_repeat_ngram_size=size), (0,))
    processor = NoRepeatNGramLogitsProcessor(size)
    row.tokens = tokens[:cut]
    for more in (tokens[cut:], []):
        row.tokens += more
        changed = torch.zeros(1, VOCAB)
        sampler.sample([row], changed)
        torch.testing.assert_close(changed, processor(torch.tensor([row.tokens]), torch.zeros(1, VOCAB)))
    row.tokens = tokens[::-1]
    changed = torch.zeros(1, VOCAB)
    sampler.sample([row], changed)
    torch.testing.assert_close(changed, processor(torch.tensor([row.tokens]), torch.zeros(1, VOCAB)))
    sampler.forget(row)
    assert sampler._ngrams._seen == {}


@pytest.mark.parametrize(
    ("prompt", "size", "banned"),
    [
        (list(range(2000)) * 2, 2000, {0}),
        (list(range(2000)) * 2, 2001, {0}),
        (list(range(2000)) * 2, 2002, set()),
        ([7] * 4000, 3999, {7}),
        ([*[7] * 1999, 8, *[7] * 1999], 2000, {8}),
        ([*[7] * 1999, 8, *[7] * 1999], 2001, set()),
        ([*range(100)] * 40, 1, set(range(100))),
    ],
)
def test_long_ngrams_of_long_prompts_are_told_apart_in_little_memory(
    prompt: list[int], size: int, banned: set[int]
) -> None:
    ngrams, row = RepeatedNgrams(), sequence(SamplingParams(no_repeat_ngram_size=size), prompt)
    tracemalloc.start()
    found = ngrams.banned(row)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert set(found) == banned
    assert len(found) < 200
    assert most < 1 << 20


def test_sequences_of_other_lengths_are_penalised_each_for_its_own_tokens() -> None:
    """The first is long, the second has one token, and the third none of the penalties."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    rows = [sequence(params, (7, 7, 8, *range(20, 40))), sequence(params, (9,)), sequence(SamplingParams(top_k=3))]
    logits = torch.zeros(3, VOCAB)
    Sampler(VOCAB, torch.device("cpu")).sample(rows, logits)
    expected = torch.zeros(3, VOCAB)
    expected[0, [7, 8, *range(20, 40)]] = -0.75
    expected[0, 7] = -1.0
    expected[1, 9] = -0.75
    assert torch.equal(logits, expected)


def test_what_was_generated_is_penalised_too() -> None:
    sampler = Sampler(VOCAB, torch.device("cpu"))
    row = sequence(SamplingParams(presence_penalty=100.0), (0,))
    made = []
    for _ in range(5):
        token = sampler.sample([row], torch.arange(VOCAB).float().flip(0).unsqueeze(0)).tokens[0]
        row.finish_with(token)
        made.append(token)
    assert made == [1, 2, 3, 4, 5]


def test_a_beam_that_goes_on_from_another_is_penalised_for_its_new_tokens_alone() -> None:
    sampler, row = Sampler(VOCAB, torch.device("cpu")), sequence(SamplingParams(frequency_penalty=1.0), (1, 2))
    for tokens in ([1, 2, 5], [1, 2, 6, 6]):
        row.tokens = tokens
        exact = torch.zeros(1, VOCAB)
        exact[0, tokens] -= torch.tensor([float(tokens.count(token)) for token in tokens])
        made = sampler.log_probs([row], torch.zeros(1, VOCAB))
        torch.testing.assert_close(made, exact.log_softmax(1))


def test_a_temperature_changes_log_probabilities_of_beams_and_top_k_does_not() -> None:
    sampler = Sampler(VOCAB, torch.device("cpu"))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    row = sequence(SamplingParams(temperature=2.0, top_k=3, top_p=0.5, seed=4))
    torch.testing.assert_close(sampler.log_probs([row], logits.clone()), (logits / 2.0).log_softmax(1))


def test_bias_is_added_before_the_temperature() -> None:
    logits = torch.zeros(1, VOCAB)
    bias = [0.0] * VOCAB
    bias[13] = 3.0
    params = SamplingParams(temperature=2.0, embedding_bias=bias, return_log_probs=True)
    made = Sampler(VOCAB, torch.device("cpu")).sample([sequence(params)], logits)
    assert made.tokens == [13]
    assert logits[0, 13] == 1.5
    assert made.log_probs == pytest.approx([float(logits[0].log_softmax(0)[13])])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=0.5, top_p=1.0),
        SamplingParams(temperature=0.5, top_k=9),
        SamplingParams(temperature=0.5, return_log_probs=True),
    ],
)
def test_a_bias_beyond_float32_wins(params: SamplingParams) -> None:
    bias = torch.zeros(VOCAB)
    bias[7] = torch.finfo(torch.float32).max
    row = sequence(replace(params, seed=1, embedding_bias=bias.tolist(), return_log_probs=True))
    sampled = Sampler(VOCAB, torch.device("cpu")).sample([row], torch.randn(1, VOCAB))
    assert (sampled.tokens, sampled.log_probs) == ([7], [0.0])


def test_bad_words_ban_only_the_token_that_would_complete_them() -> None:
    logits = torch.arange(VOCAB).float().unsqueeze(0)
    row = sequence(SamplingParams(), (3, 48), bad_words=((48, 49), (3, 47), (45,)))
    assert Sampler(VOCAB, torch.device("cpu")).sample([row], logits).tokens == [48]
    assert logits[0, 45] == float("-inf")
    assert logits[0, 47] == 47


def test_uniform_numbers_depend_on_seed_and_step_and_fill_the_interval() -> None:
    numbers = uniform([(3, position) for position in range(5000)])
    assert uniform([(9, 1), (3, 77)])[1] == numbers[77]
    assert len(set(numbers)) == 5000
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert uniform([(-1, 0)]) == uniform([(2**64 - 1, 0)])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((), 0.8),
        ((5,), 0.4),
        ((5, 6), 0.3),  # not below top_p_min
        ((5, 6, 9), 0.8),  # after the reset id
        ((9, 5), 0.4),
    ],
)
def test_top_p_decays_with_each_token_and_is_reset(made: tuple[int, ...], expected: float) -> None:
    """Probabilities 0.02 x 50: the number of tokens that can be drawn tells top_p."""
    params = SamplingParams(top_p=0.8, top_p_decay=0.5, top_p_min=0.3, top_p_reset_id=9)
    seen = set()
    for seed in range(600):
        row = sequence(replace(params, seed=seed))
        for token in made:
            row.finish_with(token)
        seen |= set(
            Sampler(VOCAB, torch.device("cpu")).sample([row], torch.linspace(1e-3, 0, VOCAB).unsqueeze(0)).tokens
        )
    assert len(seen) == pytest.approx(expected * VOCAB, abs=1)
