"""Figures of iterations: exact where an engine is small, and their sums are those of the engine's own counters."""

import json
import queue
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.runtime.checkpoints import write_engine
from tests.runtime.test_context_phase import phase_of
from tests.runtime.test_copies import copies
from tests.runtime.test_engine import requests_for
from tests.runtime.test_speculation import NGRAMS
from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import BeamParams, DraftTokens, GenerationRequest, Output
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.iteration_statistics import IterationStatistics
from trtforge.runtime.kv_store import KvStoreOptions

MOST = 10_000
LIMITS = {"tokens_per_block": 4, "max_num_tokens": 64, "max_batch_size": 4, "max_beam_width": 3}
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def directory(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(checkpoint, tmp_path_factory.mktemp("statistics") / "engine", **LIMITS)


def recorded(
    directory: Path, requests: list[GenerationRequest], options: EngineOptions | None = None, *, ahead: bool = False
) -> list[IterationStatistics]:
    """Of requests that arrive at the same time; complete, as the engine has ended."""
    options = replace(options or EngineOptions(kv_cache_tokens=256), iter_stats_max_iterations=MOST)
    with Engine.load(directory, options) as engine:
        engine._computes_ahead = ahead
        answers = at_once(engine, requests)
        assert [answer.error for answer in answers] == [None] * len(requests)
    return engine.observers.iteration_statistics(0)


def at_once(engine: Engine, requests: list[GenerationRequest]) -> list[Output]:
    """The last outputs; the engine takes all requests in before its next iteration."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(*((request, outputs.put) for request in requests))
    last = []
    while len(last) < len(requests):
        output = outputs.get(timeout=PATIENCE)
        last += [output] if output.finish_reason is not None else []
    return last


def test_each_iteration_of_a_request_has_exact_figures_and_tensorrt_llms_names(directory: Path) -> None:
    """Names: cpp/tensorrt_llm/executor/jsonSerialization.cpp of TensorRT-LLM 1.3.0rc3."""
    found = [each.as_dict() for each in recorded(directory, requests_for([PROMPT], 5))]
    assert json.loads(json.dumps(found)) == found
    for each in found:
        datetime.strptime(each.pop("timestamp"), "%m-%d-%Y %H:%M:%S.%f")
        assert each.pop("iterLatencyMS") > 0
        queued = each.pop("newActiveRequestsQueueLatencyMS")
        assert (queued > 0) == (each["iter"] == 1)
    whole = {"numQueuedRequests": 0, "maxNumActiveRequests": 4, "maxBatchSizeStatic": 4, "maxNumTokensStatic": 64}
    cache = {"maxNumBlocks": 64, "tokensPerBlock": 4, "reusedBlocks": 0, "missedBlocks": 2, "cacheHitRate": 0.0}
    batch = {"numScheduledRequests": 1, "numPausedRequests": 0, "microBatchId": 0, "avgNumDecodedTokensPerIter": 1.0}
    expected = []
    for iteration, (used, taken) in enumerate([(2, 2), (2, 2), (2, 2), (2, 2), (0, 3)], 1):
        context = iteration == 1
        last = iteration == 5
        blocks = {"freeNumBlocks": 64 - used, "usedNumBlocks": used, "allocTotalBlocks": taken, "allocNewBlocks": taken}
        work = {"numContextRequests": int(context), "numGenRequests": int(not context), "numCtxTokens": 5 * context}
        expected.append(
            {
                "iter": iteration,
                "numNewActiveRequests": int(context),
                "numActiveRequests": 1,
                "numCompletedRequests": int(last),
                "kvCacheStats": cache | blocks,
                "inflightBatchingStats": batch | work,
                "specDecodingStats": None,
                **whole,
            }
        )
    assert found == expected


def test_requests_that_do_not_fit_are_queued_and_counted_once(directory: Path) -> None:
    options = EngineOptions(kv_cache_tokens=256, max_batch_size=1)
    found = recorded(directory, requests_for([PROMPT, PROMPT[::-1]], 2), options)
    states = [
        (each.num_new_active_requests, each.num_active_requests, each.num_queued_requests, each.num_completed_requests)
        for each in found
    ]
    assert states == [(1, 1, 1, 0), (0, 1, 1, 1), (1, 1, 0, 0), (0, 1, 0, 1)]
    assert {(each.max_num_active_requests, each.max_batch_size_static) for each in found} == {(1, 1)}
    waited = [each.new_active_requests_queue_latency_ms for each in found]
    assert waited[2] > waited[0] > 0 == waited[1] == waited[3]


def test_blocks_that_are_found_again_are_hits(directory: Path) -> None:
    prompt = list(range(14))
    options = EngineOptions(kv_cache_tokens=256, iter_stats_max_iterations=MOST)
    with Engine.load(directory, options) as engine:
        for _ in range(2):
            at_once(engine, requests_for([prompt], 1))
    first, second = (each.kv_cache_stats for each in engine.observers.iteration_statistics(0))
    assert (first.reused_blocks, first.missed_blocks, first.cache_hit_rate) == (0, 4, 0.0)
    assert (second.reused_blocks, second.missed_blocks, second.cache_hit_rate) == (3, 5, 3 / 8)
    assert (first.alloc_total_blocks, second.alloc_total_blocks) == (4, 5)


def test_blocks_with_contents_are_not_new(directory: Path) -> None:
    prompts = [[number] * 14 for number in range(4)]
    options = EngineOptions(kv_cache_tokens=32, iter_stats_max_iterations=MOST)
    with Engine.load(directory, options) as engine:
        for prompt in prompts:
            at_once(engine, requests_for([prompt], 1))
    found = [each.kv_cache_stats for each in engine.observers.iteration_statistics(0)]
    assert [each.alloc_total_blocks for each in found] == [4, 8, 12, 16]
    assert [each.alloc_new_blocks for each in found] == [4, 8, 10, 11]


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(kv_cache_tokens=256),
        EngineOptions(kv_cache_tokens=96, scheduler="max_utilization", kv_reuse=False),
        EngineOptions(kv_cache_tokens=256, chunked_context=True, speculation=NGRAMS),
    ],
    ids=["plain", "paused", "chunked-drafts"],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_sums_are_those_of_the_engine(
    directory: Path, prompts: list[list[int]], options: EngineOptions, ahead: bool
) -> None:
    requests = requests_for([prompt[:40] for prompt in prompts], 12)
    with Engine.load(directory, replace(options, iter_stats_max_iterations=MOST)) as engine:
        engine._computes_ahead = ahead and options.speculation is None
        answers = generate_with(engine, requests)
        said = engine.statistics()
    found = engine.observers.iteration_statistics(0)
    assert list(dict.fromkeys(each.iter for each in found)) == list(range(1, said.iterations + 1))
    idle = [each for each in found if not each.inflight_batching_stats.num_scheduled_requests]
    assert len(found) == said.iterations + len(idle)
    assert bool(idle) == engine._computes_ahead
    assert all(each.num_completed_requests for each in idle)
    assert sum(each.num_new_active_requests for each in found) == len(requests)
    assert sum(each.num_completed_requests for each in found) == len(requests)
    batches = [each.inflight_batching_stats for each in found]
    assert sum(each.num_ctx_tokens for each in batches) == said.context_tokens
    assert sum(each.num_paused_requests for each in batches) == said.paused_requests
    assert (said.paused_requests > 0) == (options.scheduler == "max_utilization")
    for each, batch in zip(found, batches, strict=True):
        assert batch.num_scheduled_requests == batch.num_context_requests + batch.num_gen_requests
        assert batch.num_scheduled_requests <= each.num_active_requests
        assert each.kv_cache_stats.used_num_blocks + each.kv_cache_stats.free_num_blocks == said.kv_blocks_max
    if options.speculation is None:
        assert {each.spec_decoding_stats for each in found} == {None}
        assert {batch.avg_num_decoded_tokens_per_iter for batch in batches} <= {0.0, 1.0}
    else:
        drafts = [each.spec_decoding_stats for each in found]
        assert sum(each.num_draft_tokens for each in drafts if each) == said.drafted_tokens > 0
        assert sum(each.num_accepted_tokens for each in drafts if each) == said.accepted_tokens > 0
        assert None not in drafts
        assert max(batch.avg_num_decoded_tokens_per_iter for batch in batches) > 1
    made = sum(len(answer.tokens) for answer in answers)
    assert made == 12 * len(requests)


def test_drafts_of_a_request_are_counted(directory: Path) -> None:
    request = requests_for([PROMPT], 6)[0]
    with Engine.load(directory, EngineOptions(kv_cache_tokens=256)) as engine:
        tokens = generate_with(engine, [request])[0].tokens
    drafts = DraftTokens((*tokens[:2], (tokens[2] + 1) % 131))
    found = recorded(directory, [replace(request, drafts=drafts)])
    first = found[0].spec_decoding_stats
    assert first is not None
    assert first.as_dict() == {
        "numDraftTokens": 3,
        "numAcceptedTokens": 2,
        "numRequestsWithDraftTokens": 1,
        "acceptanceLength": 3.0,
    }
    assert found[0].inflight_batching_stats.avg_num_decoded_tokens_per_iter == 3.0
    assert [each.spec_decoding_stats for each in found[1:]] == [None] * 3


def test_the_first_token_of_another_engine_is_not_counted(directory: Path, tmp_path: Path) -> None:
    """Nor a request that it ends at once. The blocks come from files: those are hits."""
    request = requests_for([list(range(14))], 3)[0]
    options = EngineOptions(kv_cache_tokens=256, kv_store=KvStoreOptions(tmp_path / "kv"))
    with Engine.load(directory, options) as engine:
        phase = phase_of(request, generate_with(engine, [replace(request, context_only=True)])[0])
    found = recorded(directory, [replace(request, context_phase=phase)], options)
    batches = [each.inflight_batching_stats for each in found]
    assert [batch.avg_num_decoded_tokens_per_iter for batch in batches] == [1.0, 1.0]
    assert [batch.num_ctx_tokens for batch in batches] == [3, 0]
    assert (found[-1].kv_cache_stats.reused_blocks, found[-1].kv_cache_stats.missed_blocks) == (3, 1)
    assert recorded(directory, [replace(request, max_tokens=1, context_phase=phase)], options) == []


def test_beams_are_one_request_and_sequences_of_a_prompt_several(directory: Path) -> None:
    found = recorded(directory, requests_for([PROMPT], 3, beams=BeamParams(3, 3)))
    assert {each.inflight_batching_stats.num_scheduled_requests for each in found} == {1}
    assert [each.num_active_requests for each in found] == [1, 1, 1]
    assert sum(each.num_completed_requests for each in found) == 1
    found = recorded(directory, copies(PROMPT, 3, tokens=3))
    assert [each.inflight_batching_stats.num_scheduled_requests for each in found] == [1, 3, 3]
    assert [each.num_new_active_requests for each in found] == [3, 0, 0]
    assert [each.num_completed_requests for each in found] == [0, 0, 3]


def test_a_request_that_is_cancelled_counts_if_it_ran(directory: Path) -> None:
    options = EngineOptions(kv_cache_tokens=256, max_batch_size=1, iter_stats_max_iterations=MOST)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(directory, options) as engine:
        running, waiting = requests_for([PROMPT, PROMPT], 100)
        engine.submit((running, outputs.put))
        outputs.get(timeout=PATIENCE)
        engine.submit((waiting, outputs.put))
        engine.cancel("1")
        engine.cancel("0")
        while outputs.get(timeout=PATIENCE).request_id != "0" or engine.statistics().active_requests:
            pass
        at_once(engine, [replace(running, request_id="2", max_tokens=1)])
    found = engine.observers.iteration_statistics(0)
    last = found[-1]
    assert (last.num_completed_requests, last.num_new_active_requests, last.num_active_requests) == (2, 1, 1)
    assert sum(each.num_completed_requests for each in found) == 2


def test_the_oldest_are_dropped_and_the_end_of_the_engine_ends_waiting(directory: Path) -> None:
    options = EngineOptions(kv_cache_tokens=256, iter_stats_max_iterations=3)
    taken: list[list[Any]] = []
    with Engine.load(directory, options) as engine:
        at_once(engine, requests_for([PROMPT], 8))
        first = engine.observers.iteration_statistics(PATIENCE)
        waiter = threading.Thread(target=lambda: taken.append(engine.observers.iteration_statistics(None)))
    assert [each.iter for each in first][-1] in (7, 8)
    assert len(first) == 3
    waiter.start()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()
    assert len(taken) == 1


def test_an_engine_that_fails_lets_nobody_wait(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(kv_cache_tokens=256, iter_stats_max_iterations=3, kv_event_buffer_max_size=3)
    with Engine.load(directory, options) as engine:
        assert len(engine.observers.kv_cache_events(0)) == 1

        def fail(*_: object) -> None:
            raise ForgeError("a rank has ended", hint="None.")

        monkeypatch.setattr(engine._ranks, "execute", fail)
        waiters = [
            threading.Thread(target=read, args=(None,))
            for read in (engine.observers.kv_cache_events, engine.observers.iteration_statistics)
        ]
        for waiter in waiters:
            waiter.start()
        (output,) = at_once(engine, requests_for([PROMPT], 2))
        assert output.error is not None
        for waiter in waiters:
            waiter.join(PATIENCE)
            assert not waiter.is_alive()


def test_nothing_is_recorded_unless_asked_for(directory: Path) -> None:
    with Engine.load(directory) as engine:
        at_once(engine, requests_for([PROMPT], 2))
        with pytest.raises(ForgeError, match="the engine records no iteration statistics") as refusal:
            engine.observers.iteration_statistics(0)
    assert refusal.value.hint == "Load it with iter_stats_max_iterations, such as 1000."
    assert engine.observers._all == ()
