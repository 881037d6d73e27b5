"""Steps that begin before the host knows the tokens of the step before: no token differs, nothing is held too long."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.patience import PATIENCE
from tests.runtime.checkpoints import write_engine
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.test_speculation import KeptRanks
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import GenerationRequest, Guide, Output, SamplingParams
from trtforge.runtime.decoder.latest import put_latest
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.pacing import Pace
from trtforge.runtime.ranks.rank_model import RankModel
from trtforge.runtime.ranks.source import Source, open_engine
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Group, Sequence

KINDS: dict[str, Callable[[GenerationRequest, Tokens], GenerationRequest]] = {
    "plain": lambda request, answer: request,
    "short": lambda request, answer: replace(request, max_tokens=3),
    "end": lambda request, answer: replace(request, end_ids=frozenset(answer[6:7])),
    "stop": lambda request, answer: replace(request, stop_words=(answer[3:5], answer[8:10])),
    "drawn": lambda request, answer: replace(request, sampling=SamplingParams(top_k=20, temperature=2.0, seed=5)),
    "nucleus": lambda request, answer: replace(request, sampling=SamplingParams(top_p=0.9, temperature=2.0, seed=7)),
    "decay": lambda request, answer: replace(request, sampling=SamplingParams(top_p=0.9, top_p_decay=0.8, seed=7)),
    "penalty": lambda request, answer: replace(request, sampling=SamplingParams(repetition_penalty=1.5)),
    "scored": lambda request, answer: replace(request, sampling=SamplingParams(return_log_probs=True)),
    "urgent": lambda request, answer: replace(request, priority=0.9),
}


class AheadRanks(KeptRanks):
    """Computes steps whose tokens are not known, and counts them."""

    computes_ahead = True
    begun_early = 0

    def execute(
        self, step: Step, fills: Mapping[int, Tensor] | None = None, latest: Tensor | None = None
    ) -> Tensor | None:
        assert (latest is None) <= (step.tokens >= 0).all()
        self.begun_early += latest is not None
        return super().execute(step, fills, latest)


class Files:
    """Stands in for a store of blocks in files."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._contents: dict[bytes, Tensor] = {}
        self._fills: dict[int, Tensor] = {}

    def holds(self, key: bytes) -> bool:
        return key in self._contents

    def fetch(self, key: bytes, block: int) -> bool:
        self._fills[block] = self._contents[key]
        return True

    def forget(self, block: int) -> bool:
        return self._fills.pop(block, None) is not None

    def keep(self, key: bytes, block: int, *, waits: bool = False) -> None:
        if block not in self._fills:
            self._contents[key] = self._model.block_content(block)

    def take_fills(self) -> dict[int, Tensor]:
        fills, self._fills = self._fills, {}
        return fills

    def close(self) -> None:
        pass


def cancelling(engine: Engine, request_id: str, iterations: int) -> Callable[[], None]:
    """Cancels a request after so many iterations of the engine."""

    def after_step() -> None:
        if engine.statistics().iterations >= iterations:
            engine.cancel(request_id)

    return after_step


@pytest.fixture(scope="module")
def source(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_engine(
        write_engine(checkpoint, tmp_path_factory.mktemp("ahead") / "engine", tokens_per_block=4, max_num_tokens=24)
    )


def test_no_schedule_changes_what_requests_get(
    source: Source, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    """Requests that end early, pause, sample in every way, repeat prompts, or are cancelled in the midst."""
    sizes = (30, 64)
    usual = {size: KeptRanks(source, size) for size in sizes}
    ahead = {size: AheadRanks(source, size) for size in sizes}

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(sorted(KINDS))), min_size=1, max_size=6),
        cancelled=st.none() | st.integers(1, 5),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        blocks=st.sampled_from(sizes),
        batch=st.integers(1, 6),
    )
    @example([(0, "plain"), (1, "end"), (2, "stop")], None, "max_utilization", True, 30, 6)
    @example([(index, "plain") for index in range(6)], 2, "max_utilization", True, 30, 6)
    def check(
        chosen: list[tuple[int, str]],
        cancelled: int | None,
        policy: SchedulerPolicy,
        reuse: bool,
        blocks: int,
        batch: int,
    ) -> None:
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch)
        plain = requests_for([prompts[index] for index, _ in chosen])
        asked = [KINDS[kind](each, expected[at]) for each, (at, kind) in zip(plain, chosen, strict=True)]
        ends, idle = [], Event()
        for ranks in (usual[blocks], ahead[blocks]):
            with Engine(source, ranks, options) as engine:  # type: ignore[arg-type]
                if cancelled is not None:
                    victim = replace(plain[0], request_id="victim", max_tokens=30, streamed=False)
                    engine.after_steps(cancelling(engine, "victim", cancelled))
                    engine.submit((victim, lambda output: None))
                found = generate_with(engine, asked)
                engine.cancel("victim")
                engine.ping(idle.set)
                assert idle.wait(PATIENCE)
                idle.clear()
                assert engine.statistics().kv_blocks_used == 0
                ends.append([(each.tokens, each.finish_reason) for each in found])
        assert ends[0] == ends[1]
        for (tokens, reason), (index, kind) in zip(ends[1], chosen, strict=True):
            if kind in ("plain", "urgent"):
                assert (tokens, reason) == (expected[index], "length")

    check()
    assert sum(each.begun_early for each in ahead.values()) > 300
    for each in (*usual.values(), *ahead.values()):
        each.end()


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        ({}, True),
        ({"stop_words": ((1, 2),), "end_ids": frozenset({3})}, True),
        ({"sampling": SamplingParams(top_k=5, top_p=0.5, temperature=0.7)}, True),
        ({"sampling": SamplingParams(top_p=0.9, top_p_decay=0.5)}, False),
        ({"sampling": SamplingParams(presence_penalty=0.5)}, False),
        ({"sampling": SamplingParams(min_tokens=3)}, False),
        ({"sampling": SamplingParams(embedding_bias=(1.0,))}, False),
        ({"sampling": SamplingParams(return_log_probs=True)}, False),
        ({"bad_words": ((7,),)}, False),
        ({"guide": Guide("json")}, False),
        ({"generation_logits": True}, False),
        ({"context_logits": True}, False),
    ],
)
def test_what_needs_the_tokens_before_waits_for_them(changes: dict[str, Any], follows: bool) -> None:
    request = replace(GenerationRequest("a", (5, 6), 10), **changes)
    sequence = Sequence.of(request, 0, 100, lambda output: None)
    assert sequence.follows_logits is follows
    sequence.group = Group(2, [sequence])
    assert not sequence.follows_logits


def test_a_step_begins_before_the_tokens_of_the_one_before_are_handed_out(source: Source) -> None:
    """But not before the first token of an answer."""
    seen: list[str] = []

    class Ranks(AheadRanks):
        def execute(self, step: Step, *others: object) -> Tensor | None:
            seen.append(f"{len(step.tokens)} from {step.starts.max()}")
            return super().execute(step, *others)  # type: ignore[arg-type]

    ranks = Ranks(source, 30)
    with Engine(source, ranks, EngineOptions(kv_reuse=False)) as engine:  # type: ignore[arg-type]
        done = Event()

        def took(output: Output) -> None:
            seen.append("token")
            if output.finish_reason is not None:
                done.set()

        engine.submit((GenerationRequest("a", (7, 8, 9), 4), took))
        assert done.wait(PATIENCE)
        statistics = engine.statistics()
    ranks.end()
    assert seen == ["3 from 0", "token", "1 from 3", "1 from 4", "token", "1 from 5", "token", "token"]
    assert (statistics.iterations, statistics.generated_tokens, statistics.kv_blocks_used) == (4, 4, 0)


def test_a_step_is_computed_for_nothing_after_an_end_id_only(
    source: Source, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    """What `max_tokens` ends is known before."""
    ranks = AheadRanks(source, 64)
    at = next(at for at in range(6, 20) if expected[0][at] not in expected[0][:at])
    for end_ids, computed in ((frozenset(), at), (frozenset({expected[0][at]}), at + 2)):
        with Engine(source, ranks, EngineOptions(kv_reuse=False)) as engine:  # type: ignore[arg-type]
            asked = requests_for(prompts[:1], at if not end_ids else 24)
            (made,) = generate_with(engine, [replace(asked[0], end_ids=end_ids)])
            assert made.tokens == expected[0][:at]
            assert engine.statistics().iterations == computed
            assert engine.statistics().generated_tokens == at + bool(end_ids)
            idle = Event()
            engine.ping(idle.set)
            assert idle.wait(PATIENCE)
            assert engine._deferred is None
    ranks.end()


def test_what_is_computed_for_nothing_is_not_counted(
    source: Source, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    """A prompt takes the place of a request that ends, in whichever step another one meets its end id."""
    at = next(at for at in range(6, 20) if expected[0][at] not in expected[0][:at])
    ranks = AheadRanks(source, 64)
    for length in range(2, at + 4):
        options = EngineOptions(kv_reuse=False, chunked_context=True, max_batch_size=2)
        with Engine(source, ranks, options) as engine:  # type: ignore[arg-type]
            ending, beside, later = requests_for(prompts[:3])
            asked = [
                replace(ending, end_ids=frozenset({expected[0][at]})),
                replace(beside, max_tokens=length),
                replace(later, max_tokens=5),
            ]
            made = generate_with(engine, asked)
            assert [each.tokens for each in made] == [expected[0][:at], expected[1][:length], expected[2][:5]]
            assert engine.statistics().generated_tokens == at + 1 + length + 5
    ranks.end()


def test_an_engine_whose_deferred_requests_are_all_cancelled_waits_and_goes_on(
    source: Source, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    ranks = AheadRanks(source, 64)
    with Engine(source, ranks, EngineOptions(kv_reuse=False)) as engine:  # type: ignore[arg-type]
        made: list[int] = []
        ended = Event()

        def took(output: Output) -> None:
            made.extend(output.tokens)
            if len(made) == 4:
                engine.cancel("a")
            if output.finish_reason == "cancelled":
                ended.set()

        engine.submit((replace(requests_for(prompts[:1])[0], request_id="a"), took))
        assert ended.wait(PATIENCE)
        assert tuple(made) == expected[0][: len(made)]
        (again,) = generate_with(engine, requests_for(prompts[1:2]))
        assert again.tokens == expected[1]
        assert engine.statistics().kv_blocks_used == 0
    ranks.end()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stores", [False, True])
def test_restored_blocks_count_in_the_time_that_they_take(
    source: Source, monkeypatch: pytest.MonkeyPatch, ahead: bool, stores: bool
) -> None:
    """Those of host memory in the step that copies them, which is observed one step later if its tokens are; those of
    files when they are read. The fifth comes with the end of the prompt, whose token is not deferred."""
    prompt, observed, steps = tuple(range(3, 24)), list[int](), list[int]()
    schedule = Scheduler.schedule

    def observe(self: Pace, *_: object, restored: int, **__: object) -> None:
        observed.extend([len(steps) - 1] * restored)

    def noted(self: Scheduler) -> list[Row]:
        rows = schedule(self)
        steps.append(self.restored)
        return rows

    monkeypatch.setattr(Pace, "observe", observe)
    monkeypatch.setattr(Pace, "most_restored", 1)
    ranks = (AheadRanks if ahead else KeptRanks)(source, 16, 0 if stores else 20)
    store = Files(ranks.models[0]) if stores else None
    with Engine(source, ranks, EngineOptions(chunked_context=True), store=store) as engine:  # type: ignore[arg-type]
        for first in (prompt, tuple(range(40, 100))):  # the second one takes the blocks of the first
            generate_with(engine, [GenerationRequest("first", first, 3)])
        monkeypatch.setattr(Scheduler, "schedule", noted)
        observed.clear()
        ended = Event()

        def follow(output: Output) -> None:
            if len(steps) == 3:
                engine.submit((GenerationRequest("again", prompt, 2), lambda output: None))
            if output.finish_reason is not None:
                ended.set()

        engine.submit((GenerationRequest("running", (5, 6), 20, streamed=True), follow))
        assert ended.wait(PATIENCE)
    ranks.end()
    assert np.trim_zeros(steps) == [1] * 5
    assert observed == ([4, 5, 6, 7, 7] if ahead and not stores else [3, 4, 5, 6, 7])


@pytest.mark.parametrize(
    ("tokens", "filled"),
    [([-1, -2, -3], [70, 80, 90, 5]), ([-3, 6, -1], [90, 6, 70, 5]), ([-2], [80, 5, 5, 5]), ([1, 2], [5, 5, 5, 5])],
)
def test_unknown_tokens_are_filled_in(tokens: list[int], filled: list[int]) -> None:
    target = torch.full((4,), 5)
    target[: len(tokens)] = torch.tensor(tokens) if tokens != [1, 2] else 5
    put_latest(target, np.array(tokens), torch.tensor([70, 80, 90]))
    assert target.tolist() == filled
