"""Options for loading an engine, and the statistics of a running one."""

from dataclasses import dataclass
from pathlib import Path

from trtforge.core.recipe import SchedulerPolicy
from trtforge.runtime.decoder.kv_capacity import KvMemory
from trtforge.runtime.drafting import Speculation
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.scheduling.batch_limits import Batching
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class EngineOptions:
    """Options for loading an engine. `max_batch_size` and `max_num_tokens` lower the engine's own limits;
    `batching` is for benchmarks.

    `speculation`: None for the method that the engine was compiled with. `trace`: a file to which every iteration is
    written, with the engine's `name`. `kv_store`: files for KV blocks, which outlast the engine.
    `kv_cache_host_memory_bytes`: for each rank's KV blocks that are evicted from its device.
    `kv_event_buffer_max_size`, `iter_stats_max_iterations`: maximum number of KV cache events and iteration statistics
    kept until they are taken; 0: none are recorded.
    """

    scheduler: SchedulerPolicy = "guaranteed_no_evict"
    kv_cache_fraction: float = 0.9
    kv_cache_tokens: int | None = None
    kv_cache_host_memory_bytes: int = 0
    kv_reuse: bool = True
    chunked_context: bool = False
    threads: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    batching: Batching = "inflight"
    speculation: Speculation | None = None
    trace: Path | None = None
    name: str = "engine"
    kv_store: KvStoreOptions | None = None
    kv_event_buffer_max_size: int = 0
    iter_stats_max_iterations: int = 0

    @property
    def kv_memory(self) -> KvMemory:
        """Memory for the KV cache of each rank."""
        return KvMemory(
            fraction=self.kv_cache_fraction,
            tokens=self.kv_cache_tokens,
            host_bytes=self.kv_cache_host_memory_bytes,
            windows=not self.kv_cache_host_memory_bytes and self.kv_store is None,
        )


@dataclass(frozen=True)
class EngineStatistics:
    """A snapshot of the engine's gauges and counters. `scheduled_requests`: rows of the last step; 0 if idle.

    For blocks in host memory: their number (`secondaryMaxNumBlocks` of TensorRT-LLM's KV cache iteration statistics),
    those with content, and contents that came back to the device (the sum of its `iterOnboardBlocks`).
    """

    active_requests: int
    scheduled_requests: int
    waiting_requests: int
    max_requests: int
    kv_blocks_max: int
    kv_blocks_used: int
    kv_blocks_free: int
    kv_blocks_reused: int
    kv_window_blocks_max: int
    kv_window_blocks_used: int
    kv_host_blocks_max: int
    kv_host_blocks_used: int
    kv_host_blocks_onboarded: int
    tokens_per_block: int
    iterations: int
    context_tokens: int
    generated_tokens: int
    paused_requests: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass
class Counters:
    """Counters of an engine, by their names in EngineStatistics."""

    scheduled_requests: int = 0
    iterations: int = 0
    context_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def statistics_of(scheduler: Scheduler, counts: Counters, unfinished: int, submitted: int) -> EngineStatistics:
    """`unfinished`: requests that the engine has taken; `submitted`: requests not yet taken."""
    return EngineStatistics(
        active_requests=unfinished + submitted,
        waiting_requests=len(scheduler.waiting) + submitted,
        max_requests=scheduler.limits.max_batch_size,
        **block_figures(scheduler.blocks),
        paused_requests=scheduler.pauses,
        **vars(counts) | ({} if unfinished else {"scheduled_requests": 0}),
    )


def block_figures(blocks: BlockManager) -> dict[str, int]:
    """The statistics of the KV blocks, by their names in EngineStatistics."""
    return {
        "kv_blocks_max": blocks.num_blocks,
        "kv_blocks_used": blocks.pool.used,
        "kv_blocks_free": blocks.free_blocks,
        "kv_blocks_reused": blocks.reused_blocks,
        "kv_window_blocks_max": 0 if blocks.windows is None else blocks.windows.count,
        "kv_window_blocks_used": 0 if blocks.windows is None else blocks.windows.used,
        "kv_host_blocks_max": blocks.host.count,
        "kv_host_blocks_used": blocks.host.used,
        "kv_host_blocks_onboarded": blocks.host.onboarded,
        "tokens_per_block": blocks.tokens_per_block,
    }
