"""KV cache events and iteration statistics of the Python API."""

import gc
import json
import weakref
from pathlib import Path

import pytest

from trtforge import Engine, IterationStatistics, KvCacheCreated, KvCacheStored, SamplingParams, Tokens
from trtforge.core.errors import ForgeError

PROMPT = Tokens([*range(5, 105)])


def test_a_consumer_learns_what_an_answer_left_in_the_cache(build: Path) -> None:
    with Engine.load(build, kv_event_buffer_max_size=100) as engine:
        answer = engine.generate(PROMPT, SamplingParams(max_tokens=40, ignore_end=True))
        events = engine.kv_cache_events(timeout=0)
        assert engine.kv_cache_events(timeout=0) == []
        size = engine.statistics().tokens_per_block
        assert engine.generate(PROMPT, SamplingParams(max_tokens=1)).usage.reused_tokens == 99 // size * size
        assert engine.kv_cache_events(timeout=0) == [], "nothing new was stored"
    assert [event.event_id for event in events] == list(range(len(events)))
    assert events[0].data == KvCacheCreated((engine.statistics().kv_blocks_max, 0))
    stored = [event.data for event in events[1:]]
    assert all(isinstance(data, KvCacheStored) for data in stored)
    blocks = [block for data in stored if isinstance(data, KvCacheStored) for block in data.blocks]
    tokens = [token for block in blocks for token in block.token_ids]
    assert tokens == [*PROMPT.ids, *answer.tokens][: 139 // size * size]
    assert stored[0].parent_hash is None
    assert [data.parent_hash for data in stored[1:]] == [data.blocks[-1].block_hash for data in stored[:-1]]
    assert json.loads(json.dumps(events[1].as_dict()))["data"]["blocks"][0]["tokens"][0] == {
        "type": "unique_token",
        "token_id": 5,
        "token_extra_id": 0,
    }


def test_the_figures_of_iterations_are_those_of_the_answers(build: Path) -> None:
    with Engine.load(build, iter_stats_max_iterations=100) as engine:
        answers = engine.generate([PROMPT] * 3, SamplingParams(max_tokens=4, ignore_end=True))
    found = engine.iteration_statistics()
    assert all(isinstance(each, IterationStatistics) for each in found)
    assert sum(each.num_completed_requests for each in found) == 3
    reused = sum(answer.usage.reused_tokens for answer in answers)
    assert sum(each.inflight_batching_stats.num_ctx_tokens for each in found) == 300 - reused
    last = found[-1].as_dict()
    assert last["kvCacheStats"]["usedNumBlocks"] == 0
    assert last["iter"] == engine.statistics().iterations
    assert engine.iteration_statistics() == [], "an engine that has ended makes nobody wait"


def test_an_engine_that_records_ends_when_it_is_dropped(build: Path) -> None:
    gc.disable()
    try:
        engine = Engine.load(build, kv_event_buffer_max_size=10, iter_stats_max_iterations=10)
        engine.generate(PROMPT, SamplingParams(max_tokens=2))
        assert engine.kv_cache_events()
        assert engine.iteration_statistics()
        runtime = weakref.ref(engine._runtime)
        del engine
        assert runtime() is None
    finally:
        gc.enable()


def test_what_cannot_be_recorded_is_refused(build: Path) -> None:
    with pytest.raises(ForgeError, match="kv_event_buffer_max_size: needs KV reuse, which is off"):
        Engine.load(build, kv_reuse=False, kv_event_buffer_max_size=10)
    for name in ("kv_event_buffer_max_size", "iter_stats_max_iterations"):
        for wrong in (-1, 10**9, "many", True):
            with pytest.raises(ForgeError, match=name):
                Engine.load(build, **{name: wrong})  # type: ignore[arg-type]
    with Engine.load(build, kv_event_buffer_max_size=10) as engine:
        assert len(engine.kv_cache_events(timeout=1e300)) == 1
        assert engine.kv_cache_events(timeout=-1) == []
        for timeout in ("2", True, float("nan")):
            with pytest.raises(ForgeError, match=f"timeout is {timeout!r}, not a number of seconds"):
                engine.kv_cache_events(timeout)  # type: ignore[arg-type]
    with Engine.load(build) as engine:
        with pytest.raises(ForgeError, match="the engine records no KV cache events"):
            engine.kv_cache_events()
        with pytest.raises(ForgeError, match="the engine records no iteration statistics"):
            engine.iteration_statistics()
