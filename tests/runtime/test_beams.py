from dataclasses import replace
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.patience import PATIENCE
from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.test_speculation import KeptRanks
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import Beam, BeamParams, GenerationRequest, Guide, Output, SamplingParams
from trtforge.runtime.beams import BeamSearch
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.sequence import Sequence

LIMITS = {"max_beam_width": 5, "tokens_per_block": 4, "max_num_tokens": 128, "max_batch_size": 12}


@pytest.fixture(scope="module")
def beam_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(checkpoint, tmp_path_factory.mktemp("beams") / "engine", **LIMITS)


def searched(
    model: LlamaForCausalLM, prompt: list[int], new: int, beams: BeamParams, end_ids: list[int], **more: Any
) -> list[tuple[Tokens, float]]:
    """The beams of transformers without end ids and padding, and their scores."""
    ids = torch.tensor([prompt])
    found: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        num_beams=beams.width,
        num_return_sequences=beams.returned,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        do_sample=False,
        eos_token_id=end_ids or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    rows = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        cut = next((index for index, token in enumerate(row) if token in end_ids), len(row))
        rows.append((tuple(row[:cut]), score))
    return rows


def scored(beam: Beam, beams: BeamParams, end_ids: list[int]) -> float:
    length = len(beam.tokens) + (beam.finish_reason == "end_id")
    return beam.cumulative_log_prob / length**beams.length_penalty


@pytest.mark.parametrize(
    "beams",
    [
        BeamParams(2, 2),
        BeamParams(4, 4, length_penalty=1.0),
        BeamParams(4, 3, length_penalty=1.0, early_stopping=False),
        BeamParams(3, 1, length_penalty=-0.5, early_stopping=False),
        BeamParams(5, 5, length_penalty=2.0),
    ],
)
def test_beams_are_those_of_transformers(
    beam_engine: Path, llama: LlamaForCausalLM, prompts: list[list[int]], expected: list[Tokens], beams: BeamParams
) -> None:
    frequent = sorted({token for tokens in expected for token in tokens}, key=lambda t: -str(expected).count(f" {t},"))
    for end_ids in ([], frequent[:6]):
        asked = [
            replace(request, beams=beams, end_ids=frozenset(end_ids), sampling=SamplingParams(return_log_probs=True))
            for request in requests_for(prompts, 14)
        ]
        with Engine.load(beam_engine) as engine:
            made = generate_with(engine, asked)
            assert engine.statistics().kv_blocks_used == 0
        for generation, prompt in zip(made, prompts, strict=True):
            reference = searched(llama, prompt, 14, beams, end_ids)
            assert [tuple(beam.tokens) for beam in generation.beams] == [tokens for tokens, _ in reference]
            for beam, (_, score) in zip(generation.beams, reference, strict=True):
                assert scored(beam, beams, end_ids) == pytest.approx(score, abs=1e-3)
                assert len(beam.log_probs) == len(beam.tokens)
                if beam.finish_reason == "length":
                    assert sum(beam.log_probs) == pytest.approx(beam.cumulative_log_prob, abs=1e-4)
    assert {beam.finish_reason for generation in made for beam in generation.beams} >= {"end_id"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_beams_repeat_no_ngrams_as_in_transformers(
    beam_engine: Path, llama: LlamaForCausalLM, prompts: list[list[int]], size: int
) -> None:
    """Scores are those of the tokens that are left: what is ruled out is so before the softmax, as in TensorRT-LLM."""
    beams, sampling = BeamParams(3, 3, length_penalty=1.0), SamplingParams(no_repeat_ngram_size=size)
    repetitive = [prompt[:2] * 12 for prompt in prompts if len(prompt) > 1]
    asked = [replace(request, beams=beams, sampling=sampling) for request in requests_for(repetitive, 14)]
    with Engine.load(beam_engine) as engine:
        made = generate_with(engine, asked)
        assert engine._sampler._ngrams._seen == {}
    for generation, prompt in zip(made, repetitive, strict=True):
        reference = searched(llama, prompt, 14, beams, [], no_repeat_ngram_size=size, renormalize_logits=True)
        assert [tuple(beam.tokens) for beam in generation.beams] == [tokens for tokens, _ in reference]
        for beam, (_, score) in zip(generation.beams, reference, strict=True):
            assert scored(beam, beams, []) == pytest.approx(score, abs=1e-3)


def kernel(table: list[list[list[float]]], beams: BeamParams, new: int, end: int) -> list[tuple[float, Tokens]]:
    """The search of TensorRT-LLM's beamStage3Kernel: finished beams with their log probabilities, the best first.

    `table`: at each step log probabilities of each token after each other one; the prompt ends with token 0.
    """
    running: list[tuple[float, Tokens]] = [(0.0, ())]
    finished: list[tuple[float, float, Tokens]] = []
    for step in range(1, new + 1):
        found = [
            (score + log_prob + place * beams.diversity_rate, score + log_prob, tokens, token)
            for place, (score, tokens) in enumerate(running)
            for token, log_prob in enumerate(table[step - 1][tokens[-1] if tokens else 0])
        ]
        found = sorted(found, key=lambda each: -each[0])[: 2 * beams.width]
        enough = beams.early_stopping and len(finished) == beams.width
        for _, score, tokens, token in found[: beams.width]:
            if not enough and (token == end or step == new):
                own = tokens if token == end else (*tokens, token)
                finished.append((score / step**beams.length_penalty, score, own))
        finished = sorted(finished, key=lambda each: -each[0])[: beams.width]
        running = [(score, (*tokens, token)) for _, score, tokens, token in found if token != end][: beams.width]
        best = max((score / step**beams.length_penalty for score, _ in running), default=-inf)
        if len(finished) == beams.width and (beams.early_stopping or best <= finished[-1][0]):
            break
    return [(score, tokens) for _, score, tokens in finished]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(2, 5),
    rate=st.sampled_from([0.0, 0.1, 0.5, 2.0, 1000.0]),
    penalty=st.sampled_from([0.0, 1.0]),
    early=st.booleans(),
    new=st.integers(1, 7),
)
def test_a_diversity_rate_favours_worse_beams_as_the_kernel_does(
    seed: int, width: int, rate: float, penalty: float, early: bool, new: int
) -> None:
    table = (2 * torch.randn(new, 9, 9, generator=torch.Generator().manual_seed(seed))).log_softmax(2)
    beams = BeamParams(width, width, penalty, early, rate)
    request = GenerationRequest("0", (0,), new, beams=beams, end_ids=frozenset({8}))
    first = Sequence.of(request, 0, 100, lambda _: None)
    first.group = search = BeamSearch.of(beams, first)
    for step in table:
        if search.advance(step[[member.tokens[-1] for member in search.members]]) is None:
            break
    expected = kernel(table.double().tolist(), beams, new, 8)
    assert [tuple(beam.tokens) for beam in search.output().beams] == [tokens for _, tokens in expected]
    for beam, (score, _) in zip(search.output().beams, expected, strict=True):
        assert beam.cumulative_log_prob == pytest.approx(score, abs=1e-4)


def test_a_diversity_rate_changes_an_engines_beams(beam_engine: Path, prompts: list[list[int]]) -> None:
    asked = [
        replace(request, beams=BeamParams(4, 4, diversity_rate=rate))
        for rate in (0.0, 0.0, 1.0, -1.0)
        for request in requests_for(prompts[:3], 10)
    ]
    with Engine.load(beam_engine) as engine:
        made = generate_with(engine, asked)
    plain, again, diverse = (made[start : start + 3] for start in (0, 3, 6))
    assert [one.beams for one in plain] == [one.beams for one in again]
    both = list(zip(plain, diverse, strict=True))
    assert all(one.beams[0].cumulative_log_prob >= other.beams[0].cumulative_log_prob for one, other in both)
    assert any(one.beams != other.beams for one, other in both)
    assert {str(one.error) for one in made[9:]} == {"beam_search_diversity_rate is -1"}


def test_beams_share_the_blocks_of_their_prompt(beam_engine: Path) -> None:
    source = open_engine(beam_engine)
    prompt = tuple(range(1, 42))
    ranks = KeptRanks(source, 200)
    used = []
    with Engine(source, ranks, EngineOptions(kv_reuse=False)) as engine:  # type: ignore[arg-type]
        engine.after_steps(lambda: used.append(engine.statistics().kv_blocks_used))
        (made,) = generate_with(engine, [GenerationRequest("a", prompt, 6, beams=BeamParams(5, 5))])
    ranks.end()
    assert len(made.beams) == 5
    # 41 tokens: 10 full blocks that all share, a last one for each, and another for each from the 45th token on.
    assert max(used) <= 10 + 2 * 5
    assert made.beams[0].cumulative_log_prob >= made.beams[-1].cumulative_log_prob


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=["one", "tp2", "pp2"])
def test_no_schedule_changes_beams(
    llama: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]], expected: list[Tokens], layout: Layout
) -> None:
    source = open_engine(write_engine(write_checkpoint(llama, tmp_path / "c", layout), tmp_path / "e", **LIMITS))
    ranks = {blocks: KeptRanks(source, blocks) for blocks in (96, 160)}
    beams = BeamParams(4, 4, length_penalty=1.0, early_stopping=False)
    known: dict[int, list[Tokens]] = {}

    @settings(max_examples=25 if layout == Layout() else 4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=6),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        blocks=st.sampled_from([96, 160]),
        batch=st.integers(4, 12),
    )
    def check(chosen: list[tuple[int, bool]], policy: SchedulerPolicy, reuse: bool, blocks: int, batch: int) -> None:
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch)
        plain = requests_for([prompts[index] for index, _ in chosen], 12)
        asked = [
            replace(request, beams=beams) if searching and index != 7 else replace(request, max_tokens=24)
            for request, (index, searching) in zip(plain, chosen, strict=True)
        ]
        with Engine(source, ranks[blocks], options) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, asked)
            assert engine.statistics().kv_blocks_used == 0
        for generation, request, (index, _) in zip(made, asked, chosen, strict=True):
            if request.beams is None:
                assert generation.tokens == expected[index]
                continue
            if index not in known:
                known[index] = [tokens for tokens, _ in searched(llama, prompts[index], 12, beams, [])]
            assert [tuple(beam.tokens) for beam in generation.beams] == known[index]

    check()
    for each in ranks.values():
        each.end()


def test_penalties_bans_and_stop_words_hold_in_beams(beam_engine: Path, prompts: list[list[int]]) -> None:
    with Engine.load(beam_engine) as engine:
        request = replace(requests_for(prompts[:1], 12)[0], beams=BeamParams(3, 3))
        (free,) = generate_with(engine, [request])
        first = free.beams[0].tokens
        banned, stopped, longer, penalised = generate_with(
            engine,
            [
                replace(request, bad_words=((first[0],),)),
                replace(request, stop_words=(tuple(first[2:4]),)),
                replace(request, end_ids=frozenset({first[1]}), sampling=SamplingParams(min_tokens=6)),
                replace(request, sampling=SamplingParams(presence_penalty=1e4)),
            ],
        )
    assert all(first[0] not in beam.tokens for beam in banned.beams)
    reasons = {beam.finish_reason for beam in stopped.beams}
    assert "stop_word" in reasons
    for beam in stopped.beams:
        if beam.finish_reason == "stop_word":
            assert tuple(beam.tokens[-2:]) == tuple(first[2:4])
    assert all(len(beam.tokens) >= 6 for beam in longer.beams)
    assert all(len(set(beam.tokens)) == 12 for beam in penalised.beams)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest("a", (1,), 4, beams=BeamParams(6, 6)), "beam_width is 6, this engine takes at most 5"),
        (
            GenerationRequest("a", (1,), 4, SamplingParams(prompt_log_probs=True), beams=BeamParams(2, 2)),
            "beam search does not return top log probabilities",
        ),
        (GenerationRequest("a", (1,), 4, guide=Guide("json"), beams=BeamParams(2, 2)), "does not support a guide"),
        (GenerationRequest("a", (1,), 4, beams=BeamParams(2, 2, length_penalty=1e30)), "len_penalty is 1e+30"),
        (GenerationRequest("a", (1,), 4, beams=BeamParams(2, 2, length_penalty=float("nan"))), "len_penalty is nan"),
        (
            GenerationRequest("a", (1,), 90, beams=BeamParams(4, 4)),
            "may need 368 tokens of KV cache, which holds 256",
        ),
    ],
)
def test_a_search_that_cannot_be_done_is_refused(beam_engine: Path, request_: GenerationRequest, message: str) -> None:
    with Engine.load(beam_engine, EngineOptions(kv_cache_tokens=256)) as engine:
        (made,) = generate_with(engine, [request_])
    assert message in str(made.error)


def test_a_cancelled_search_frees_the_blocks_of_all_beams(beam_engine: Path) -> None:
    import threading

    steps, done = threading.Event(), threading.Event()
    with Engine.load(beam_engine) as engine:
        engine.after_steps(lambda: engine.statistics().generated_tokens > 30 and steps.set())
        request = GenerationRequest("x", (1, 2, 3), 150, beams=BeamParams(4, 4))
        engine.submit((request, lambda output: done.set() if output.finish_reason == "cancelled" else None))
        assert steps.wait(30)
        engine.cancel("x")
        assert done.wait(30)
        assert engine.statistics().kv_blocks_used == 0
        assert engine.statistics().active_requests == 0


@pytest.mark.parametrize("reuse", [True, False])
def test_beams_that_are_paused_go_on_as_they_were(
    llama: LlamaForCausalLM, beam_engine: Path, prompts: list[list[int]], reuse: bool
) -> None:
    beams = BeamParams(3, 3)
    options = EngineOptions(scheduler="max_utilization", kv_cache_tokens=200, kv_reuse=reuse, chunked_context=True)
    chosen = [prompts[index] for index in (0, 1, 3, 6)]
    with Engine.load(beam_engine, options) as engine:
        made = generate_with(engine, [replace(each, beams=beams) for each in requests_for(chosen, 40)])
        assert engine.statistics().paused_requests > 0
    for generation, prompt in zip(made, chosen, strict=True):
        assert [tuple(beam.tokens) for beam in generation.beams] == [
            tokens for tokens, _ in searched(llama, prompt, 40, beams, [])
        ]


@pytest.mark.parametrize(
    ("left", "changes", "found"),
    [
        ((7,), {}, [(7, 7, 7)]),
        ((7, 9), {"end_ids": frozenset((9,))}, [(), (7,), (7, 7)]),
        ((9,), {"end_ids": frozenset((9,))}, [()]),
        ((7,), {"bad_words": ((7, 7),)}, None),
    ],
)
def test_no_beam_holds_a_token_that_is_ruled_out(
    beam_engine: Path, left: Tokens, changes: dict[str, Any], found: list[Tokens] | None
) -> None:
    """There are fewer beams then, and an error if there is none."""
    bias = [0.0 if token in left else -inf for token in range(131)]
    sampling = SamplingParams(embedding_bias=bias)
    beams = BeamParams(3, 3, early_stopping=False)
    ruled = GenerationRequest("a", (5, 6), 3, sampling, beams=beams)
    with Engine.load(beam_engine) as engine:
        (answer, free) = generate_with(engine, [replace(ruled, **changes), GenerationRequest("b", (5, 6), 3)])
        assert engine.statistics().kv_blocks_used == 0
    assert len(free.tokens) == 3
    if found is None:
        assert answer.finish_reason == "error"
        assert answer.error is not None
        assert answer.error.message == "the options of the request exclude all tokens"
    else:
        assert sorted(beam.tokens for beam in answer.beams) == sorted(found)


def test_a_search_that_ends_without_a_beam_reports_when_it_ran_and_what_it_used(beam_engine: Path) -> None:
    bias = [0.0 if token == 7 else -inf for token in range(131)]
    asked = GenerationRequest(
        "a", (5, 6), 3, SamplingParams(embedding_bias=bias), bad_words=((7, 7),), beams=BeamParams(3, 3)
    )
    found: SimpleQueue[Output] = SimpleQueue()
    with Engine.load(beam_engine) as engine:
        engine.submit((asked, found.put))
        output = found.get(timeout=PATIENCE)
    assert (output.finish_reason, output.cached_tokens, output.allocated_blocks) == ("error", 0, 1)
    assert output.scheduled_ns > 0
