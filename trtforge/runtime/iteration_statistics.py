"""Statistics of each iteration, like those of TensorRT-LLM's executor.

Names and JSON dictionaries are those of TensorRT-LLM 1.3.0rc3: `IterationStats` and related types in cpp/include/
tensorrt_llm/executor/types.h, their JSON in cpp/tensorrt_llm/executor/jsonSerialization.cpp.
"""

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import Any

from trtforge.core.recent import Recent
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Sequence

_TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"
"""TensorRT-LLM's format (tensorrt_llm/_torch/pyexecutor/py_executor.py), in local time."""


class _AsJson:
    def as_dict(self) -> dict[str, Any]:
        """As TensorRT-LLM's JSON, for `json.dumps`."""
        assert is_dataclass(self)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            _json_name(name): value.as_dict() if isinstance(value, _AsJson) else value for name, value in values.items()
        }


def _json_name(name: str) -> str:
    """The JSON name of a field: `iter_latency_ms` becomes iterLatencyMS."""
    first, *others = name.split("_")
    return first + "".join("MS" if word == "ms" else word.capitalize() for word in others)


@dataclass(frozen=True)
class KvCacheStatistics(_AsJson):
    """KV blocks on the device now; the last five figures count all iterations so far.

    `used_num_blocks`: blocks that requests hold. `alloc_total_blocks`: how often a request took a block;
    `alloc_new_blocks`: how often the block had no content of earlier requests. `reused_blocks`, `missed_blocks`: prompt
    blocks that were found in the cache or not; an incomplete last block counts; a paused request looks them up again.
    `cache_hit_rate`: reused / (reused + missed).
    """

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    alloc_new_blocks: int
    reused_blocks: int
    missed_blocks: int
    cache_hit_rate: float

    @classmethod
    def of(cls, blocks: BlockManager) -> "KvCacheStatistics":
        """The statistics of an engine's blocks."""
        looked_for = blocks.reused_blocks + blocks.missed_blocks
        return cls(
            max_num_blocks=blocks.num_blocks,
            free_num_blocks=blocks.free_blocks,
            used_num_blocks=blocks.pool.used,
            tokens_per_block=blocks.tokens_per_block,
            alloc_total_blocks=blocks.pool.taken,
            alloc_new_blocks=blocks.pool.taken_empty,
            reused_blocks=blocks.reused_blocks,
            missed_blocks=blocks.missed_blocks,
            cache_hit_rate=blocks.reused_blocks / looked_for if looked_for else 0.0,
        )


@dataclass(frozen=True)
class InflightBatchingStatistics(_AsJson):
    """What one iteration computed. A request's beams count as one request.

    `num_context_requests`: requests of which prompt tokens were computed, `num_ctx_tokens` in total; the others are
    `num_gen_requests`. `num_paused_requests`: paused in this iteration because other requests needed their KV blocks.
    `micro_batch_id`: 0, as there is only one batch. `avg_num_decoded_tokens_per_iter`: average number of tokens per
    request that got any.
    """

    num_scheduled_requests: int
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    num_ctx_tokens: int
    micro_batch_id: int
    avg_num_decoded_tokens_per_iter: float


@dataclass(frozen=True)
class SpecDecodingStatistics(_AsJson):
    """Draft tokens that one iteration verified and accepted, and the number of requests with draft tokens.

    `acceptance_length`: average tokens per request with drafts, (accepted + requests) / requests; 0 without requests.
    TensorRT-LLM's time of drafting (`iterLatencyMS`, `draftOverhead`) is not measured.
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    num_requests_with_draft_tokens: int
    acceptance_length: float


@dataclass(frozen=True)
class IterationStatistics(_AsJson):
    """One iteration. `iter` counts from 1.

    `timestamp`: when it ended, in local time, as MM-DD-YYYY HH:MM:SS.ffffff. `iter_latency_ms`: how long it took.
    A request is queued from when the engine takes it in, between iterations, until it first runs; then it is active
    until it ends, even while paused. `num_new_active_requests`: requests that became active in this iteration; they
    were queued for `new_active_requests_queue_latency_ms` in total. `num_active_requests` includes those that ended in
    it; `num_queued_requests`: at its end. `num_completed_requests`: active requests that ended since the previous
    iteration, including cancelled, timed-out and failed ones. `max_num_active_requests`: maximum that run at once.
    `max_batch_size_static`, `max_num_tokens_static`: maximum sequences and tokens of an iteration.
    `spec_decoding_stats`: None if no draft tokens are verified.

    On a GPU the next iteration begins before the last one's tokens are known. These tokens, and the requests that end
    with them, count in the next iteration or, if there is none, in a separate entry with the same `iter`.

    Missing fields of TensorRT-LLM: memory in use, results of its batch size tuner (`maxBatchSizeRuntime`, ...), and
    static batching.
    """

    timestamp: str
    iter: int
    iter_latency_ms: float
    new_active_requests_queue_latency_ms: float
    num_new_active_requests: int
    num_active_requests: int
    num_queued_requests: int
    num_completed_requests: int
    max_num_active_requests: int
    max_batch_size_static: int
    max_num_tokens_static: int
    kv_cache_stats: KvCacheStatistics
    inflight_batching_stats: InflightBatchingStatistics
    spec_decoding_stats: SpecDecodingStatistics | None


@dataclass(slots=True)
class _Known:
    """A request's state after the last iteration. `arrived`: by `monotonic_ns`; `ended`: by `perf_counter`."""

    sequence: Sequence
    arrived: int
    active: bool = False
    generated: int = 0
    accepted: int = 0
    ended: float = 0.0


class IterationRecorder:
    """Keeps the statistics of the latest iterations. All but `take` and `close` run on the engine's thread."""

    def __init__(self, count: int, *, drafts: bool) -> None:
        """`count`: maximum number of iterations kept; `drafts`: the engine has a drafter."""
        self._iterations: Recent[IterationStatistics] = Recent(count)
        self._drafts = drafts
        self._known: dict[str, _Known] = {}
        self._ended: list[_Known] = []
        self._pauses = 0

    def begin(self, sequence: Sequence) -> None:
        """See Observer."""
        given = int(sequence.request.context_phase is not None)  # another engine generated the first token
        self._known[sequence.request.request_id] = _Known(sequence, time.monotonic_ns(), generated=given)

    def end(self, sequence: Sequence, scheduler: Scheduler) -> None:
        """See Observer."""
        known = self._known.pop(sequence.request.request_id, None)
        if known is not None and sequence.begun:
            known.ended = time.perf_counter()
            self._ended.append(known)

    def iteration(self, number: int, rows: Rows[Row], times: Rows[float], sampled: int, scheduler: Scheduler) -> None:
        """See Observer."""
        active = [each for each in (*self._known.values(), *self._ended) if each.sequence.begun]
        new = [each for each in active if not each.active]
        got = [made for each in active if (made := each.sequence.generated - each.generated)]
        accepted = sum(each.sequence.accepted - each.accepted for each in active)
        batching = self._batching(rows, scheduler.pauses - self._pauses, sum(got) / len(got) if got else 0.0)
        drafted = any(row.drafts for row in rows)
        entry = IterationStatistics(
            timestamp=datetime.now().strftime(_TIMESTAMP),
            iter=number,
            iter_latency_ms=(times[-1] - times[0]) * 1e3,
            new_active_requests_queue_latency_ms=sum(each.sequence.scheduled_ns - each.arrived for each in new) / 1e6,
            num_new_active_requests=len(new),
            num_active_requests=sum(not each.ended or each.ended >= times[0] for each in active),
            num_queued_requests=sum(not each.sequence.begun for each in self._known.values()),
            num_completed_requests=len(self._ended),
            max_num_active_requests=min(scheduler.limits.max_batch_size, scheduler.limits.max_num_tokens),
            max_batch_size_static=scheduler.limits.max_batch_size,
            max_num_tokens_static=scheduler.limits.max_num_tokens,
            kv_cache_stats=KvCacheStatistics.of(scheduler.blocks),
            inflight_batching_stats=batching,
            spec_decoding_stats=_drafting(rows, accepted) if self._drafts or drafted else None,
        )
        for each in active:
            each.active, each.generated, each.accepted = True, each.sequence.generated, each.sequence.accepted
        self._ended, self._pauses = [], scheduler.pauses
        self._iterations.add(entry)

    def take(self, timeout: float | None) -> list[IterationStatistics]:
        """The iterations since the last call, the oldest first; see `Recent.take`. On any thread."""
        return self._iterations.take(timeout)

    def close(self) -> None:
        """See Observer."""
        self._iterations.close()

    def _batching(self, rows: Rows[Row], paused: int, decoded: float) -> InflightBatchingStatistics:
        prompts = [row for row in rows if row.start < len(row.sequence.request.prompt)]
        requests = {row.sequence.request.request_id for row in rows}
        contexts = {row.sequence.request.request_id for row in prompts}
        return InflightBatchingStatistics(
            num_scheduled_requests=len(requests),
            num_context_requests=len(contexts),
            num_gen_requests=len(requests - contexts),
            num_paused_requests=paused,
            num_ctx_tokens=sum(row.count for row in prompts),
            micro_batch_id=0,
            avg_num_decoded_tokens_per_iter=decoded,
        )


def _drafting(rows: Rows[Row], accepted: int) -> SpecDecodingStatistics:
    requests = sum(bool(row.drafts) for row in rows)
    return SpecDecodingStatistics(
        num_draft_tokens=sum(len(row.drafts) for row in rows),
        num_accepted_tokens=accepted,
        num_requests_with_draft_tokens=requests,
        acceptance_length=(accepted + requests) / requests if requests else 0.0,
    )
