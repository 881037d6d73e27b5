"""The embedded engine: a thread that runs requests with in-flight batching and streams their tokens."""

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError, RequestError
from trtforge.engine_process.requests import FinishReason, GenerationRequest, OnOutput, Output, TopLogProbs
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.runtime.beams import BeamSearch, advance_searches
from trtforge.runtime.client_drafts import Drafts
from trtforge.runtime.context_only import StoredFirst
from trtforge.runtime.copies import Copies
from trtforge.runtime.deadlines import Deadlines
from trtforge.runtime.deferred import Deferred, deferred
from trtforge.runtime.delivery import deliver
from trtforge.runtime.drafting import Drafter
from trtforge.runtime.failures import failure_of
from trtforge.runtime.guidance.guides import Guides
from trtforge.runtime.inbox import Inbox
from trtforge.runtime.kv_store import KvStore
from trtforge.runtime.observers import Observers
from trtforge.runtime.opening import new_scheduler, open_parts
from trtforge.runtime.options import Counters, EngineOptions, EngineStatistics, statistics_of
from trtforge.runtime.pacing import Pace
from trtforge.runtime.prompt_scores import score_prompts
from trtforge.runtime.prompt_tables import PromptTables
from trtforge.runtime.ranks.engine_adapters import EngineAdapters
from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.source import Source
from trtforge.runtime.sampler import Sampler
from trtforge.runtime.scheduling.admission import why_refused
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.rows import Row, context_tokens, moves_of, sampling_rows
from trtforge.runtime.scheduling.sequence import Sequence

__all__ = ["Engine", "EngineOptions", "EngineStatistics"]
_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT = 30.0  # seconds that the running step may take before its ranks are ended
_EXIT_TIMEOUT = 10.0  # seconds, the same at process exit; an output callback may also hang


class Engine:
    """Generates tokens for many requests at once. All methods may be called from any thread."""

    def __init__(
        self,
        source: Source,
        ranks: RankGroup,
        options: EngineOptions,
        drafter: Drafter | None = None,
        observers: Observers | None = None,
        store: KvStore | None = None,
    ) -> None:
        self._source, self._ranks, self._options = source, ranks, options
        self._sequences = sequences = dict[str, Sequence]()
        self._adapters = EngineAdapters(source, lambda: {each.adapter for each in sequences.values()})
        self._tables = PromptTables(source)
        self.observers = observers or Observers()
        self._scheduler = new_scheduler(source, ranks, options, store, self._adapters.most, self.observers.blocks)
        self._guides = Guides(source.directory / TOKENIZER_DIRECTORY, source.config.vocab_size)
        self._sampler = Sampler(source.config.vocab_size, torch.device(source.forge.device), self._guides)
        self._inbox, self._deadlines, self._store = Inbox(), Deadlines(), store
        self._after_steps: tuple[Callable[[], None], ...] = ()
        self._stored_first = StoredFirst(store, self._inbox.ping)
        self._arrivals, self._counts, self._copies = 0, Counters(), Copies(shares=not source.keeps_states)
        self._drafts = Drafts(drafter, torch.device(source.forge.device), keeps_states=source.keeps_states)
        self._computes_ahead = ranks.computes_ahead and drafter is None
        self._deferred: Deferred | None = None
        self._pace, self._done = Pace(), 0.0  # `_done`: when the last step ended
        self._thread = threading.Thread(target=self._run, name="trtforge-engine", daemon=True)
        self._thread.start()
        atexit.register(self._close, _EXIT_TIMEOUT)  # a step that returns from torch's C++ later aborts the process

    @classmethod
    def load(cls, directory: Path, options: EngineOptions | None = None) -> "Engine":
        """Load a torch-backend engine on all its ranks, by default with its manifest's features. Raises ForgeError."""
        with ExitStack() as opened:
            engine = cls(*open_parts(directory, options, opened))
            opened.pop_all()
        return engine

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return self._ranks.worker_pids + self._drafts.worker_pids

    @property
    def max_running(self) -> int:
        """Maximum number of running sequences; further ones wait."""
        return self._scheduler.limits.max_batch_size

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> None:
        """Queue requests together, each with the callback for its outputs. The next step considers all of them.

        Callbacks run on the engine's thread; a refused request gets one output with an error. If the engine is closed
        or has failed, they run at once, on the caller's thread.
        """
        error = self._inbox.submit(*requests)
        for request, on_output in () if error is None else requests:
            deliver(on_output, Output(request.request_id, finish_reason="error", error=error))

    def cancel(self, request_id: str, *, only_waiting: bool = False) -> None:
        """Cancel a request; an unknown id is ignored. `only_waiting`: only if it has not begun to run."""
        self._inbox.cancel(request_id, only_waiting=only_waiting)

    def ping(self, on_turn: Callable[[], None]) -> None:
        """Call `on_turn` from the engine's thread in its next loop iteration; never after it closed or failed."""
        self._inbox.ping(on_turn)

    def after_steps(self, on_step: Callable[[], None]) -> None:
        """Call `on_step` from the engine's thread after the outputs of each step and of cancelled requests."""
        self._after_steps = (*self._after_steps, on_step)

    def check(self) -> None:
        """Raises ForgeError if a rank has ended."""
        self._ranks.check()

    def figures(self) -> dict[str, float]:
        """`statistics` by name, and the numbers of sequences `running` and `preparing` (waiting for their guides)."""
        return vars(self.statistics()) | {"running": len(self._scheduler.running), "preparing": self._guides.preparing}

    def statistics(self) -> EngineStatistics:
        """The current gauges and counters."""
        return statistics_of(self._scheduler, self._counts, len(self._sequences), self._inbox.submitted)

    def close(self) -> None:
        """Cancel unfinished requests and end the ranks. May be called again."""
        self._close(_CLOSE_TIMEOUT)

    def _close(self, timeout: float) -> None:
        if not self._inbox.close():  # in a forked process: the threads, files and ranks are the parent's
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        self._guides.close()
        has_workers = bool(self.worker_pids)
        self._ranks.close()
        self._drafts.close()
        if has_workers and threading.current_thread() is not self._thread:
            self._thread.join(timeout)  # a step that waited for a worker has failed by now
        self._adapters.close()
        if self._store is not None:
            self._store.close()
        self.observers.close()
        atexit.unregister(self._close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        torch.set_num_threads(self._ranks.threads)
        try:
            with torch.inference_mode():
                is_open = True
                while is_open:
                    is_open = self._collect()
                    if is_open:
                        self._step()
                    for on_step in self._after_steps:
                        on_step()
        except Exception as error:
            self._fail(failure_of(error))
        finally:
            self._ranks.free()
            self._drafts.end()

    def _collect(self) -> bool:
        """Process submissions and cancellations; blocks while idle. Returns False when the engine must close."""
        news = self._inbox.take(wait=self._scheduler.idle, seconds=self._deadlines.seconds_left())
        for on_turn in news.pings:
            on_turn()
        for request, on_output in news.submitted:
            self._take(request, self._stored_first.receiver(request, on_output))
        for sequence, error in news.prepared:
            if sequence.finish_reason is not None:
                self._guides.forget(sequence)
            elif error is not None:
                self._end(sequence, "error", error=error)
            else:
                self._scheduler.add(sequence)
        for request_id in news.cancelled_if_waiting & self._sequences.keys():
            if not self._copies.has_begun(self._sequences[request_id]):
                self._end(self._sequences[request_id], "cancelled")
        for sequence in self._deadlines.passed():
            self._end(sequence, "timed_out")
        closing = self._inbox.closing
        for request_id in self._sequences.keys() & (self._sequences if closing else news.cancelled):
            self._end(self._sequences[request_id], "cancelled")
        if closing:
            self._stored_first.flush()
        return not closing

    def _take(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Begin to work on a request; an unexpected error ends this request only."""
        try:
            self._enter(request, on_output)
        except Exception as error:
            _LOG.exception("a request could not be queued")
            failure = RequestError(f"the request could not be queued: {error!r}", hint="The traceback is in the log.")
            known = self._sequences.get(request.request_id)
            if known is not None and known.on_output is on_output:
                self._end(known, "error", error=failure)
            else:
                deliver(on_output, Output(request.request_id, finish_reason="error", error=failure))

    def _enter(self, request: GenerationRequest, on_output: OnOutput) -> None:
        virtual, error = self._tables.read(request)
        if error is None and request.request_id in self._sequences:
            error = RequestError(f"request id {request.request_id} is in use", hint="Give every request its own id.")
        error = error or why_refused(
            request,
            self._scheduler.limits,
            self._source.forge.features,
            vocab_size=self._source.config.vocab_size,
            blocks=self._scheduler.blocks,
            chunked_context=self._options.chunked_context,
            adapters=self._adapters,
            speculation=self._options.speculation,
        )
        if error is not None:
            deliver(on_output, Output(request.request_id, finish_reason="error", error=error))
            return
        request = self._adapters.resolved(request)
        sequence = Sequence.of(request, self._arrivals, self._source.limits.max_seq_len, on_output, virtual)
        if request.beams is not None and request.beams.width > 1:
            sequence.group = BeamSearch.of(request.beams, sequence)
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._drafts.add(sequence)
        self._deadlines.add(sequence)
        self.observers.begin(sequence)
        if (phase := request.context_phase) is not None:  # another engine chose its first token, which may end it
            top = tuple(phase.top[: request.sampling.top_log_probs])
            self._hand_out(sequence, phase.first_token, phase.log_prob or 0.0, top)
        if sequence.finish_reason is not None or self._copies.attached(sequence, self._sequences):
            return
        if request.guide is None or self._guides.prepare(sequence, self._inbox.prepared):
            self._scheduler.add(sequence)

    def _step(self) -> None:
        """Begin a step; hand out the previous step's tokens if they were deferred, then this step's if they are not."""
        earlier, self._deferred = self._deferred, None
        if self._scheduler.idle:  # all requests whose tokens were deferred may have been cancelled
            return
        times = [perf_counter()]
        paced = any(sequence.request.streamed for sequence in self._scheduler.running)
        self._scheduler.most_context = self._pace.most_context if paced else None
        self._scheduler.most_restored = self._pace.most_restored if paced else None
        if earlier is not None:
            earlier.assume()
        self._drafts.draft(self._scheduler.running)
        rows = self._adapters.readable(self._scheduler.schedule(), self._end)
        times.append(perf_counter())
        if not rows and earlier is None:  # all rows lost their adapters
            return
        logits = self._execute(rows, earlier) if rows else None
        before, own = self._counts.generated_tokens, self._scheduler.copied if earlier else self._scheduler.restored
        if rows and self._computes_ahead:
            self._deferred = deferred(rows, logits, self._sampler.choose, times[0], own)
        times.append(perf_counter())
        if earlier is not None:
            self._hand_out_deferred(earlier, times)
        self._drafts.observe(rows, logits)
        for row in rows:
            self._scheduler.complete(row)
        if logits is not None and self._deferred is None:
            self._sample(rows, logits, times)
        if rows and self._deferred is None:
            self._observe(times[0], context_tokens(rows), own, alone=rows[0].count > 1)
        if self._scheduler.idle:  # all requests of the step that has begun have ended
            self._deferred = None
        sampled = self._counts.generated_tokens - before
        self.observers.iteration(self._counts.iterations, rows, times, sampled, self._scheduler)

    def _execute(self, rows: list[Row], before: Deferred | None) -> Tensor | None:
        """Compute a step's logits; `before`: the previous step, if the host does not know its tokens yet."""
        self._counts.iterations += 1
        self._counts.scheduled_requests = len(rows)
        self._counts.context_tokens += sum(row.count for row in rows if row.start < len(row.sequence.request.prompt))
        step = Step.of_rows(rows, self._scheduler.blocks.take_copies(), self._scheduler.blocks.windows)
        fills = self._store.take_fills() if self._store is not None else None
        return self._ranks.execute(step, fills, None if before is None else before.tokens)

    def _hand_out_deferred(self, earlier: Deferred, times: list[float]) -> None:
        """Wait for a step's tokens and hand them out; the next step has begun, and its stored blocks have been read."""
        known, read = earlier.known(), self._scheduler.restored - self._scheduler.copied
        self._observe(earlier.begun, earlier.context, earlier.restored + read, alone=earlier.alone)
        times.append(self._done)
        if self._store is not None:  # ending a sequence waits for the GPU: do that last
            known.sort(key=lambda each: each[0].sequence.why_ends(each[1]) is not None)
        for row, token in known:
            if row.sequence.finish_reason is None:
                self._counts.generated_tokens += 1
                self._hand_out(row.sequence, token, 0.0, ())

    def _observe(self, begun: float, context: int, restored: int, *, alone: bool) -> None:
        """Record the duration of a step from `begun`, or from the end of the previous step if that was later."""
        now = perf_counter()
        self._pace.observe(now - max(begun, self._done), context, alone=alone, restored=restored)
        self._done = now

    def _sample(self, rows: list[Row], logits: Tensor, times: list[float]) -> None:
        """Hand out a token for each sampling row and accepted draft; the time of the first ones goes to `times`."""
        if any(row.scores for row in rows):
            score_prompts(rows, logits)
        for row in [row for row in rows if row.drafts]:
            row.sequence.drafted += len(row.drafts)
            self._counts.drafted_tokens += len(row.drafts)
        pending = sampling_rows(rows)
        pending = self._search(pending + self._copies.joined(pending, self._scheduler), logits)
        verified, depth = [row for row, _ in pending], 0
        while pending:
            sequences, indices = [row.sequence for row, _ in pending], [index for _, index in pending]
            for sequence, index in zip(sequences, indices, strict=True):
                sequence.keep_logits(logits, index)
            own = logits if indices == list(range(len(logits))) else logits[indices]
            sampled = self._sampler.sample(sequences, own, depth)
            self._counts.generated_tokens += len(pending)
            log_probs = sampled.log_probs or [0.0] * len(pending)
            tops = sampled.top or [()] * len(pending)
            for stuck in [sequences[index] for index in sampled.stuck]:
                self._end(stuck, "error", error=stuck.failure or self._guides.stuck(stuck))
            if depth == 0:
                times[3:] = [perf_counter()]
            accepted = []
            for (row, index), token, log_prob, top in zip(pending, sampled.tokens, log_probs, tops, strict=True):
                before, hits = row.at, row.accept(token)
                row.sequence.accepted += hits
                self._counts.accepted_tokens += hits
                if row.sequence.finish_reason is None:
                    self._hand_out(row.sequence, token, log_prob, top)
                if hits and row.sequence.finish_reason is None:
                    accepted.append((row, index + row.at - before))
            self._ranks.move(moves_of((row for row, _ in accepted), depth, self._scheduler.blocks.tokens_per_block))
            for row, _ in accepted:
                self._scheduler.accept(row.sequence)
            pending, depth = accepted, depth + 1
        self._drafts.finish(verified, self._end)

    def _search(self, pending: list[tuple[Row, int]], logits: Tensor) -> list[tuple[Row, int]]:
        """Advance the beam searches among `pending`: rows with the indices of their logits. Returns the other rows."""
        searching = {row.sequence: index for row, index in pending if row.sequence.group is not None}
        if not searching:
            return pending
        for search in advance_searches(searching, logits, self._sampler, self._scheduler):
            self._end(search.members[0], (output := search.output()).finish_reason or "error", output=output)
        self._counts.generated_tokens += len(searching)
        return [(row, index) for row, index in pending if row.sequence not in searching]

    def _hand_out(self, sequence: Sequence, token: int, log_prob: float, top: TopLogProbs) -> None:
        reason = sequence.finish_with(token)
        if reason == "end_id":
            self._end(sequence, reason)
            return
        sequence.cumulative_log_prob += log_prob
        output = sequence.output(reason, token, log_prob, top)
        if reason is not None:
            self._end(sequence, reason, output=output)
        elif not deliver(sequence.on_output, output):
            self._end(sequence, "cancelled")

    def _end(
        self, sequence: Sequence, reason: FinishReason, *, output: Output | None = None, error: ForgeError | None = None
    ) -> None:
        """End a sequence with its last `output`, by default one without a token."""
        if self._copies.detached(sequence, self._scheduler):
            sequence.finish_reason = reason
        for member in sequence.group.members if sequence.group is not None else [sequence]:
            self._scheduler.finish(member, reason)
        self.observers.end(sequence, self._scheduler)
        self._sampler.forget(sequence)
        self._drafts.forget(sequence)
        self._deadlines.forget(sequence)
        self._sequences.pop(sequence.request.request_id, None)
        deliver(sequence.on_output, output or sequence.output(reason, error=error))

    def _fail(self, error: ForgeError) -> None:
        """End every request with `error`; later ones get it from `submit`."""
        submitted = self._inbox.fail(error)
        self._stored_first.flush()
        for sequence in list(self._sequences.values()):
            self._end(sequence, "error", error=error)
        for request, on_output in submitted:
            deliver(on_output, Output(request.request_id, finish_reason="error", error=error))
        for on_step in self._after_steps:
            on_step()
        self.observers.close()
