"""Logits processors get and change what those of `transformers` do, beside any schedule and every other option."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessorList

from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.tables import VOCABULARY, asked, random_table, take_tables
from tests.runtime.test_deferred import AheadRanks
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from trtforge.core.errors import RequestError
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import BeamParams, DraftTokens, LogitsProcessor, SamplingParams
from trtforge.runtime.drafting import NgramDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import Generation, generate, generate_with
from trtforge.runtime.ranks.source import open_engine

NEW = 24
BIAS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(7)) * 3


def noise(tokens: list[int]) -> Tensor:
    """What is added to the logits after these tokens: it depends on their number and on the last one."""
    generator = torch.Generator().manual_seed(1000 * len(tokens) + tokens[-1])
    return torch.randn(VOCABULARY, generator=generator) * 0.3


def add_noise(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
    for beam, own in enumerate(tokens):
        logits[:, beam] += noise(own).to(logits.device)


def add_bias(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
    logits += BIAS.to(logits.device)


def transformed(ids: Tensor, scores: Tensor) -> Tensor:
    """`add_noise` for `transformers`."""
    return scores + torch.stack([noise(row) for row in ids.tolist()])


@pytest.fixture(scope="module")
def noisy(llama: LlamaForCausalLM, prompts: list[list[int]]) -> list[Tokens]:
    """The answers of `transformers` with `add_noise`."""
    return greedy(llama, prompts, NEW, logits_processor=LogitsProcessorList([transformed]))


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "ahead"])
def test_greedy_tokens_are_those_of_transformers_under_any_schedule(
    llama: LlamaForCausalLM,
    tmp_path: Path,
    layout: str,
    prompts: list[list[int]],
    expected: list[Tokens],
    noisy: list[Tokens],
) -> None:
    assert not set(noisy) & set(expected)
    ranked = {"tp2": Layout(tp=2), "pp2": Layout(pp=2)}.get(layout, Layout())
    checkpoint = write_checkpoint(llama, tmp_path / "checkpoint", ranked)
    source = open_engine(write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4, max_num_tokens=24))
    ranks = (AheadRanks if layout == "ahead" else KeptRanks)(source, 40)
    accepted = [0]

    @settings(max_examples=30 if layout == "one" else 6)
    @given(
        chosen=st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), min_size=1, max_size=6),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        batch=st.integers(1, 6),
        drafts=st.booleans(),
    )
    def check(chosen: list[tuple[int, bool, bool]], policy: SchedulerPolicy, batch: int, drafts: bool) -> None:
        wanted = [(noisy if processed else expected)[index] for index, processed, _ in chosen]
        asked = requests_for([prompts[index] for index, _, _ in chosen], NEW)
        for at, (_, processed, drafted) in enumerate(chosen):
            processors = (add_noise,) if processed else ()
            own = DraftTokens(wanted[at][:9]) if drafted else None
            asked[at] = replace(asked[at], logits_processors=processors, drafts=own)
        options = EngineOptions(scheduler=policy, chunked_context=True, max_batch_size=batch)
        drafter = NgramDrafter(NGRAMS) if drafts and layout != "ahead" else None
        with Engine(source, ranks, options, drafter) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, asked)
            accepted[0] += engine.statistics().accepted_tokens
            assert engine.statistics().kv_blocks_used == 0
        assert [generation.tokens for generation in made] == wanted

    check()
    assert accepted[0] > 0
    ranks.end()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(return_log_probs=True, top_log_probs=3),
        SamplingParams(top_k=20, temperature=1.3, seed=5),
        SamplingParams(top_p=0.9, seed=6, repetition_penalty=1.3),
        SamplingParams(top_p=1.0, seed=7, min_tokens=3),
    ],
)
def test_a_constant_processor_is_a_bias(
    engine_directory: Path, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    biased = requests_for(prompts, 12, sampling=replace(sampling, embedding_bias=tuple(BIAS.tolist())))
    processed = requests_for(prompts, 12, sampling=sampling, logits_processors=(add_bias,))
    assert generate(engine_directory, processed) == generate(engine_directory, biased)


def test_beams_are_processed_together(checkpoint: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", max_beam_width=4, tokens_per_block=4)
    seen: list[tuple[int, tuple[int, ...], int]] = []

    def processor(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
        seen.append((number, tuple(logits.shape), len({len(own) for own in tokens})))
        add_bias(number, logits, tokens, stream, client)

    beams = BeamParams(4, 4, length_penalty=1.0)
    scored = SamplingParams(return_log_probs=True)
    biased = replace(scored, embedding_bias=tuple(BIAS.tolist()))
    with Engine.load(directory, EngineOptions(kv_reuse=False)) as engine:
        wanted = generate_with(engine, requests_for(prompts[:2], 8, sampling=biased, beams=beams))
        found = generate_with(
            engine, requests_for(prompts[:2], 8, sampling=scored, beams=beams, logits_processors=(processor,))
        )
    assert [each.beams for each in found] == [each.beams for each in wanted]
    assert {shape for _, shape, _ in seen} == {(1, 1, VOCABULARY), (1, 4, VOCABULARY)}
    assert {lengths for _, _, lengths in seen} == {1}
    assert len({number for number, _, _ in seen}) == 2


def test_processors_follow_one_another_and_know_their_request(engine_directory: Path, prompts: list[list[int]]) -> None:
    calls: list[tuple[str, int, list[int], float]] = []

    def noting(name: str, change: Callable[[Tensor], object]) -> LogitsProcessor:
        def processor(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
            calls.append((name, number, tokens[0], float(logits[0, 0, 5])))
            change(logits)

        return processor

    processors = (noting("a", lambda logits: logits.fill_(3.0)), noting("b", lambda logits: logits[0, 0, 9].add_(2.0)))
    request = requests_for(prompts[:1], 3, logits_processors=processors)[0]
    copy = replace(request, copy_of="0", sampling=SamplingParams(seed=1))
    with Engine.load(engine_directory) as engine:
        made = generate_with(engine, [request, copy])
    assert [each.tokens for each in made] == [(9, 9, 9)] * 2
    first, second = sorted({number for _, number, _, _ in calls})
    for number in (first, second):
        own = [(name, tokens, logit) for name, of, tokens, logit in calls if of == number]
        assert [name for name, _, _ in own] == ["a", "b"] * 3
        assert [tokens for _, tokens, _ in own[::2]] == [[*prompts[0], *[9] * made] for made in range(3)]
        assert {logit for name, _, logit in own if name == "b"} == {3.0}


def test_the_prompt_of_a_table_is_that_of_the_request(checkpoint: Path, tmp_path: Path) -> None:
    directory = take_tables(write_engine(checkpoint, tmp_path / "engine"))
    prompt = [5, 6, *range(VOCABULARY, VOCABULARY + 9), 7]
    seen: list[list[int]] = []

    def processor(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
        seen.append(tokens[0])

    made = generate(directory, [asked(0, prompt, random_table(9, seed=1), 3, logits_processors=(processor,))])[0]
    assert seen == [[*prompt, *made.tokens[:count]] for count in range(3)]


def failing(error: BaseException) -> LogitsProcessor:
    def processor(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
        raise error

    return processor


class Unreadable(Exception):
    def __str__(self) -> str:
        raise AttributeError("nothing")


def filling(value: float) -> LogitsProcessor:
    def processor(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
        logits[..., 3:] = value

    return processor


@pytest.mark.parametrize("beams", [None, BeamParams(2, 2)])
@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (failing(ValueError("no\nsuch token")), "the logits processor failed: ValueError: no"),
        (failing(SystemExit(3)), "the logits processor failed: SystemExit: 3"),
        (failing(Unreadable()), "the logits processor failed: Unreadable: Unreadable"),
        (filling(math.nan), "the logits processor set a logit to nan"),
        (filling(math.inf), "the logits processor set a logit to inf"),
    ],
)
def test_a_processor_that_fails_ends_its_request_only(
    checkpoint: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    expected: list[Tokens],
    processor: LogitsProcessor,
    message: str,
    beams: BeamParams | None,
) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", max_beam_width=2)
    asked = requests_for(prompts[:3], NEW)
    asked[1] = replace(asked[1], logits_processors=(processor,), beams=beams)
    with Engine.load(directory) as engine:
        made = generate_with(engine, asked)
        assert engine.statistics().kv_blocks_used == 0
    assert [made[0].tokens, made[2].tokens] == [expected[0], expected[2]]
    error = made[1].error
    assert isinstance(error, RequestError)
    assert (error.message, made[1].tokens) == (message, ())
    assert isinstance(error.__cause__, (ValueError, SystemExit, Unreadable)) == ("failed" in message)


@pytest.mark.parametrize("beams", [None, BeamParams(2, 2)])
def test_a_processor_may_leave_no_token(
    checkpoint: Path, tmp_path: Path, prompts: list[list[int]], beams: BeamParams | None
) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", max_beam_width=2)

    def processor(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
        logits.fill_(-math.inf)

    made = generate(directory, requests_for(prompts[:1], 5, logits_processors=(processor,), beams=beams))[0]
    assert made.error is not None
    assert made.error.message == "the options of the request exclude all tokens"


def test_large_logits_stay_numbers(engine_directory: Path, prompts: list[list[int]]) -> None:
    """A low temperature makes 1e38 more than float32 holds."""

    def processor(number: int, logits: Tensor, tokens: list[list[int]], stream: None, client: None) -> None:
        logits[..., 8] = 1e38

    def made(sampling: SamplingParams) -> Generation:
        return generate(
            engine_directory, requests_for(prompts[:1], 4, sampling=sampling, logits_processors=(processor,))
        )[0]

    assert made(SamplingParams(top_p=0.9, temperature=0.1)).tokens == (8, 8, 8, 8)
    assert made(SamplingParams(top_k=4, temperature=0.1, return_log_probs=True)).log_probs == (0.0,) * 4
