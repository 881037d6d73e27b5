"""Observers of an engine's iterations: a trace, statistics and KV cache events."""

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
    """Receives requests and iterations. All methods but `close` run on the engine's thread."""

    def begin(self, sequence: Sequence) -> None:
        """A request was accepted."""

    def end(self, sequence: Sequence, scheduler: Scheduler) -> None:
        """A request ended. `scheduler`: in its state after that."""

    def iteration(self, number: int, rows: Rows[Row], times: Rows[float], sampled: int, scheduler: Scheduler) -> None:
        """An iteration has ended. `times`: perf_counter at the beginning of each phase and the end of the last one.

        An iteration without rows only handed out the tokens of the previous step, which has the same number.

        `sampled`: number of sampled tokens, end ids included; `scheduler`: in its state after the iteration.
        """

    def close(self) -> None:
        """Nothing more follows. May be called again."""


class Observers:
    """The observers of one engine, each of which its options may enable."""

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
        """The enabled ones. Raises ForgeError if the trace cannot be written, or for KV events without KV reuse."""
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
        return cls(None if options.trace is None else Trace(options.trace, options.name), iterations, events)

    def begin(self, sequence: Sequence) -> None:
        """See Observer."""
        for each in self._all:
            each.begin(sequence)

    def end(self, sequence: Sequence, scheduler: Scheduler) -> None:
        """See Observer."""
        for each in self._all:
            each.end(sequence, scheduler)

    def iteration(self, number: int, rows: Rows[Row], times: Rows[float], sampled: int, scheduler: Scheduler) -> None:
        """See Observer. Phases that did not happen took no time."""
        if not self._all:
            return
        times = [*times, *[perf_counter()] * (len(PHASES) + 1 - len(times))]
        for each in self._all:
            each.iteration(number, rows, times, sampled, scheduler)

    def close(self) -> None:
        """See Observer. Wakes waiting callers; recorded events and statistics can still be taken."""
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
