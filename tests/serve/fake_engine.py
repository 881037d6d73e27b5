"""An engine without a model: answers with its prompt, over and over, one token every few milliseconds.

Run as the program of the engine process, it lets the server's side be tested by itself.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trtforge.core.errors import ForgeError, RequestError
from trtforge.engine_process.host import host
from trtforge.engine_process.requests import FinishReason, GenerationRequest, OnOutput, Output, PromptLogProbs
from trtforge.runtime.hosted import HostJob

LONGEST_PROMPT = 200
BLOCKS = 100
HANGING = 123_456
"""A request for this many tokens stops the engine for ever."""
SLOW_WHILE = "TRTFORGE_TESTS_SLOW_WHILE"
"""Variable with the path of a file: while it exists, a step takes half a second."""


@dataclass
class Running:
    request: GenerationRequest
    on_output: Callable[[Output], None]
    tokens: list[int] = field(default_factory=list)
    scheduled_ns: int = field(default_factory=time.monotonic_ns)

    def step(self) -> Output:
        """The next token of the prompt; the end where an end id, a stop word or max_tokens says so."""
        request = self.request
        if len(request.prompt) > LONGEST_PROMPT:
            error = RequestError(
                f"the prompt has {len(request.prompt)} tokens, {LONGEST_PROMPT} fit", hint="Shorten the prompt."
            )
            return Output(request.request_id, (), "error", error)
        token = request.prompt[len(self.tokens) % len(request.prompt)]
        if request.context_phase is not None and not self.tokens:
            token = request.context_phase.first_token
        if token in request.end_ids and len(self.tokens) >= request.sampling.min_tokens:
            return self._output((), "end_id")
        self.tokens.append(token)
        if any(tuple(self.tokens[-len(word) :]) == word for word in request.stop_words):
            return self._output((token,), "stop_word")
        return self._output((token,), "length" if len(self.tokens) >= request.most_new else None)

    def _output(self, tokens: tuple[int, ...], reason: FinishReason | None) -> Output:
        sampling, prompt = self.request.sampling, None
        if sampling.prompt_log_probs and len(self.tokens) <= 1:
            rest = self.request.prompt[1:]
            prompt = PromptLogProbs([-0.25] * len(rest), [self._top(token) for token in rest])
        return Output(
            self.request.request_id,
            tokens,
            reason,
            log_probs=tuple(-0.5 for _ in tokens),
            cumulative_log_prob=-0.5 * len(self.tokens),
            reused_blocks=1,
            allocated_blocks=3,
            cached_tokens=1,
            top_log_probs=tuple(self._top(token) for token in tokens) if sampling.top_log_probs else (),
            prompt_log_probs=prompt,
            scheduled_ns=self.scheduled_ns,
        )

    def _top(self, token: int) -> list[tuple[int, float]]:
        """The token itself, and those after it in the vocabulary."""
        return [(token + rank, -0.5 - rank) for rank in range(self.request.sampling.top_log_probs)]


class Engine:
    """A RequestEngine."""

    max_running = 64
    worker_pids: tuple[int, ...] = ()

    def __init__(self, directory: Path) -> None:
        if not (directory / "config.json").is_file():
            raise ForgeError(f"{directory} has no config.json", hint="Compile again.")
        if (directory / "broken").exists():
            raise ForgeError("rank 0 ended: out of memory", hint="Lower max_batch_size.")
        self._running: dict[str, Running] = {}
        self._lock = threading.Lock()
        self._iterations = 0
        self._after_steps: list[Callable[[], None]] = []
        slow = os.environ.get(SLOW_WHILE)
        self._slow = None if slow is None else Path(slow)
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> None:
        with self._lock:
            self._running.update((request.request_id, Running(request, on_output)) for request, on_output in requests)

    def cancel(self, request_id: str, *, only_waiting: bool = False) -> None:
        with self._lock:
            running = None if only_waiting else self._running.pop(request_id, None)
        if running is not None:
            running.on_output(Output(request_id, (), "cancelled"))

    def ping(self, on_turn: Callable[[], None]) -> None:
        on_turn()

    def after_steps(self, on_step: Callable[[], None]) -> None:
        self._after_steps.append(on_step)

    def figures(self) -> dict[str, float]:
        with self._lock:
            active = len(self._running)
        return {
            "running": active,
            "active_requests": active,
            "max_requests": self.max_running,
            "kv_blocks_max": BLOCKS,
            "kv_blocks_used": active,
            "kv_blocks_free": BLOCKS - active,
            "iterations": self._iterations,
        }

    def check(self) -> None: ...

    def close(self) -> None: ...

    def _run(self) -> None:
        while True:
            time.sleep(0.5 if self._slow is not None and self._slow.exists() else 0.005)
            self._iterations += 1
            with self._lock:
                running = dict(self._running)
            if any(one.request.max_tokens == HANGING for one in running.values()):
                threading.Event().wait()
            for name, one in running.items():
                output = one.step()
                with self._lock:
                    if name not in self._running:
                        continue
                    if output.finish_reason is not None:
                        del self._running[name]
                one.on_output(output)
            for on_step in self._after_steps:
                on_step()


def main() -> int:
    """The engine process, told what `trtforge.runtime.hosted` is told."""
    job = HostJob.model_validate_json(sys.argv[1])
    return host(lambda: Engine(Path(job.engine)), Path(job.socket), job.limits())


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
