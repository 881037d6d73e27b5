import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE
from tests.runtime.checkpoints import write_engine
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import GenerationRequest, Output, SamplingParams
from trtforge.runtime.drafting import NgramDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.ranks.source import Source, open_engine


@pytest.fixture(scope="module")
def source(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("copies") / "engine"
    return open_engine(write_engine(checkpoint, directory, tokens_per_block=4, max_num_tokens=64, max_batch_size=8))


def copies(prompt: list[int], count: int, first: int = 0, tokens: int = 12) -> list[GenerationRequest]:
    """Requests for `count` sequences of one prompt; ids are indices, `first` that of the original."""
    return [
        GenerationRequest(
            str(first + index),
            tuple(prompt),
            tokens,
            SamplingParams(top_k=30, temperature=1.4, seed=index, return_log_probs=True),
            copy_of=str(first) if index else None,
        )
        for index in range(count)
    ]


def test_copies_compute_their_prompt_once_and_share_its_blocks(source: Source, prompts: list[list[int]]) -> None:
    asked = copies(prompts[4], 5)
    ranks = KeptRanks(source, 120)
    with Engine(source, ranks, EngineOptions(kv_reuse=False)) as engine:  # type: ignore[arg-type]
        alone = [generate_with(engine, [replace(each, copy_of=None)])[0] for each in asked]
        before, used = engine.statistics(), []
        engine.after_steps(lambda: used.append(engine.statistics().kv_blocks_used))
        made = generate_with(engine, asked)
        after = engine.statistics()
    ranks.end()
    assert [each.tokens for each in made] == [each.tokens for each in alone]
    for each, reference in zip(made, alone, strict=True):
        assert each.log_probs == pytest.approx(reference.log_probs, abs=1e-4)
    assert [each.reused_blocks for each in made] == [0, 8, 8, 8, 8]
    assert after.context_tokens - before.context_tokens == 33
    # 33 tokens fill 8 blocks that all share; each has 12 more positions, less the last, in 3 blocks of its own.
    assert max(used) == 8 + 5 * 3
    assert after.kv_blocks_used == 0


def test_no_schedule_changes_copies(source: Source, prompts: list[list[int]]) -> None:
    ranks = {blocks: KeptRanks(source, blocks) for blocks in (27, 64)}
    with Engine(source, ranks[64], EngineOptions(kv_reuse=False)) as engine:  # type: ignore[arg-type]
        known = {
            (index, copy.sampling.seed): generate_with(engine, [replace(copy, copy_of=None)])[0].tokens
            for index in range(7)
            for copy in copies(prompts[index], 5)
        }

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=4),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        blocks=st.sampled_from([27, 64]),
        batch=st.integers(1, 8),
        drafts=st.booleans(),
    )
    def check(
        chosen: list[tuple[int, int]], policy: SchedulerPolicy, reuse: bool, blocks: int, batch: int, drafts: bool
    ) -> None:
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch)
        asked: list[GenerationRequest] = []
        keys = []
        for index, count in chosen:
            asked += copies(prompts[index], count, len(asked))
            keys += [(index, seed) for seed in range(count)]
        drafter = NgramDrafter(NGRAMS) if drafts else None
        with Engine(source, ranks[blocks], options, drafter) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, asked)
            assert engine.statistics().kv_blocks_used == 0
        assert [each.tokens for each in made] == [known[key] for key in keys]

    check()
    for each in ranks.values():
        each.end()


@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_copy_and_its_original_end_without_each_other(source: Source, prompts: list[list[int]], victim: str) -> None:
    """Cancelled while a long prompt runs before them."""
    ranks = KeptRanks(source, 64)
    ended: dict[str, Output] = {}
    done = threading.Event()

    def receive(output: Output) -> None:
        if output.finish_reason is not None:
            ended[output.request_id] = output
            if len(ended) == 4:
                done.set()

    with Engine(source, ranks, EngineOptions(max_batch_size=1)) as engine:  # type: ignore[arg-type]
        before = GenerationRequest("before", tuple(prompts[0]), 60)
        engine.submit(*((request, receive) for request in (before, *copies(prompts[1], 3))))
        engine.cancel(victim, only_waiting=True)
        assert done.wait(PATIENCE)
        assert engine.statistics().active_requests == 0
        assert engine.statistics().kv_blocks_used == 0
    ranks.end()
    reasons = {name: output.finish_reason for name, output in ended.items()}
    assert reasons == {"before": "length", "0": "length", "1": "length", "2": "length"} | {victim: "cancelled"}


def test_a_copy_of_a_copy_or_of_itself_computes_its_own_prompt(source: Source, prompts: list[list[int]]) -> None:
    first, second, third = copies(prompts[4], 3)
    asked = [first, second, replace(third, copy_of=second.request_id), replace(third, request_id="x", copy_of="x")]
    ranks = KeptRanks(source, 120)
    with Engine(source, ranks, EngineOptions(kv_reuse=False)) as engine:  # type: ignore[arg-type]
        alone = [generate_with(engine, [replace(each, copy_of=None)])[0] for each in asked]
        made = generate_with(engine, asked)
    ranks.end()
    assert [each.tokens for each in made] == [each.tokens for each in alone]
