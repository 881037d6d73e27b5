"""What follows an engine's iterations and tells others of them: a trace, statistics, events of KV blocks."""

from collections.abc import Sequence as Rows
from time import perf_counter
from typing import Protocol

from trtforge.core.errors import ForgeError
from trtforge.formats.attention_windows import widest_window
from trtforge.runtime.iteration_statistics import IterationRecorder, IterationStatistics
from trtforge.runtime.options import EngineOptions
from trtforge.runtime.ranks.source import Source
from trtforge.runtime.scheduling.block_events import KvCacheEvent
from trtforge.runtime.scheduling.event_recorder import EventRecorder
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Sequence
from trtforge.runtime.trace import PHASES, Trace


class Observer(Protocol):
    """Told of requests and iterations, all but `close` on the engine's thread."""

    def begin(self, sequence: Sequence) -> None:
        """A request was accepted."""

    def end(self, sequence: Sequence) -> None:
        """A request ended."""

    def iteration(self, number: int, rows: Rows[Row], times: Rows[float], sampled: int, scheduler: Scheduler) -> None:
        """An iteration that is over. `times`: perf_counter where each phase began and the last one ended.

        Without rows it only handed out tokens of the step before, which has the same number.

        `sampled`: tokens that were sampled, end ids included; the scheduler is in its state after the iteration.
        """

    def close(self) -> None:
        """No more will be told. May be called again."""


class Observers:
    """Those of one engine, each of which its options may ask for."""

    def __init__(
        self,
        trace: Trace | None = None,
        iterations: IterationRecorder | None = None,
        blocks: EventRecorder | None = None,
    ) -> None:
        self.blocks = blocks
        self._iterations = iterations
        self._all: tuple[Observer, ...] = tuple(each for each in (trace, iterations) if each is not None)

    @classmethod
    def of(cls, source: Source, options: EngineOptions) -> "Observers":
        """Raises ForgeError if the trace cannot be written, or if there are events of no blocks."""
        events = iterations = None
        if options.kv_event_buffer_max_size:
            source.require_shared("kv_event_buffer_max_size", options.kv_reuse)
            longest = source.limits.max_seq_len
            window = min(widest_window(source.config) or longest, longest)
            events = EventRecorder(
                options.kv_event_buffer_max_size, window_size=window, vocab_size=source.config.vocab_size
            )
        if options.iter_stats_max_iterations:
            drafts = options.speculation is not None
            iterations = IterationRecorder(options.iter_stats_max_iterations, drafts=drafts)
        return cls(None if options.trace is None else Trace(options.trace), iterations, events)

    def begin(self, sequence: Sequence) -> None:
        """See Observer."""
        for each in self._all:
            each.begin(sequence)

    def end(self, sequence: Sequence) -> None:
        """See Observer."""
        for each in self._all:
            each.end(sequence)

    def iteration(self, number: int, rows: Rows[Row], times: Rows[float], sampled: int, scheduler: Scheduler) -> None:
        """See Observer. Phases that did not happen took no time."""
        if not self._all:
            return
        times = [*times, *[perf_counter()] * (len(PHASES) + 1 - len(times))]
        for each in self._all:
            each.iteration(number, rows, times, sampled, scheduler)

    def close(self) -> None:
        """See Observer. Nobody waits for events and statistics any more; those that are there can be taken."""
        for each in self._all:
            each.close()
        if self.blocks is not None:
            self.blocks.close()

    def kv_cache_events(self, timeout: float | None) -> list[KvCacheEvent]:
        """See `EventRecorder.take`. Raises ForgeError if the engine records none."""
        if self.blocks is None:
            hint = "Load it with a kv_event_buffer_max_size, such as 10000."
            raise ForgeError("the engine records no KV cache events", hint=hint)
        return self.blocks.take(timeout)

    def iteration_statistics(self, timeout: float | None) -> list[IterationStatistics]:
        """See `IterationRecorder.take`. Raises ForgeError if the engine records none."""
        if self._iterations is None:
            hint = "Load it with iter_stats_max_iterations, such as 1000."
            raise ForgeError("the engine records no iteration statistics", hint=hint)
        return self._iterations.take(timeout)
