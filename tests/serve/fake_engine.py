"""An engine without a model: answers with its prompt, over and over, one token every few milliseconds.

Put into `sys.modules` under the engine's name, it lets the server's side be tested by itself.
"""

import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trtforge.core.errors import ForgeError, RequestError
from trtforge.runtime.requests import FinishReason, GenerationRequest, Output

LONGEST_PROMPT = 200
BLOCKS = 100


@dataclass(frozen=True)
class EngineOptions:
    scheduler: str = "guaranteed_no_evict"
    kv_cache_fraction: float = 0.9
    kv_cache_tokens: int | None = None
    kv_reuse: bool = True
    chunked_context: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class EngineStatistics:
    active_requests: int = 0
    max_requests: int = 64
    scheduled_requests: int = 0
    waiting_requests: int = 0
    kv_blocks_max: int = BLOCKS
    kv_blocks_used: int = 0
    kv_blocks_free: int = BLOCKS
    kv_blocks_reused: int = 0
    tokens_per_block: int = 16
    iterations: int = 0
    context_tokens: int = 0
    paused_requests: int = 0


@dataclass
class Running:
    request: GenerationRequest
    on_output: Callable[[Output], None]
    tokens: list[int] = field(default_factory=list)

    def step(self) -> Output:
        """The next token of the prompt; the end where an end id, a stop word or max_tokens says so."""
        request = self.request
        if len(request.prompt) > LONGEST_PROMPT:
            error = RequestError(
                f"the prompt has {len(request.prompt)} tokens, {LONGEST_PROMPT} fit", hint="Shorten the prompt."
            )
            return Output(request.request_id, (), "error", error)
        token = request.prompt[len(self.tokens) % len(request.prompt)]
        if token in request.end_ids and len(self.tokens) >= request.sampling.min_tokens:
            return self._output((), "end_id")
        self.tokens.append(token)
        if any(tuple(self.tokens[-len(word) :]) == word for word in request.stop_words):
            return self._output((token,), "stop_word")
        return self._output((token,), "length" if len(self.tokens) >= request.max_tokens else None)

    def _output(self, tokens: tuple[int, ...], reason: FinishReason | None) -> Output:
        return Output(
            self.request.request_id,
            tokens,
            reason,
            log_probs=tuple(-0.5 for _ in tokens),
            cumulative_log_prob=-0.5 * len(self.tokens),
            reused_blocks=1,
            allocated_blocks=3,
        )


class Engine:
    @classmethod
    def load(cls, directory: Path, options: EngineOptions = EngineOptions()) -> "Engine":
        if not (directory / "config.json").is_file():
            raise ForgeError(f"{directory} has no config.json", hint="Compile again.")
        if (directory / "broken").exists():
            raise ForgeError("rank 0 ended: out of memory", hint="Lower max_batch_size.")
        return cls()

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}
        self._lock = threading.Lock()
        self._iterations = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> None:
        with self._lock:
            self._running[request.request_id] = Running(request, on_output)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            running = self._running.pop(request_id, None)
        if running is not None:
            running.on_output(Output(request_id, (), "cancelled"))

    def statistics(self) -> EngineStatistics:
        with self._lock:
            active = len(self._running)
        return EngineStatistics(
            active_requests=active, kv_blocks_used=active, kv_blocks_free=BLOCKS - active, iterations=self._iterations
        )

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        pass

    def _run(self) -> None:
        while True:
            time.sleep(0.005)
            self._iterations += 1
            with self._lock:
                running = dict(self._running)
            for name, one in running.items():
                output = one.step()
                with self._lock:
                    if name not in self._running:
                        continue
                    if output.finish_reason is not None:
                        del self._running[name]
                one.on_output(output)


def install() -> None:
    """Stand in for trtforge.runtime's engine in this process."""
    engine = types.ModuleType("trtforge.runtime.engine")
    for kind in (Engine, EngineOptions, EngineStatistics):
        setattr(engine, kind.__name__, kind)
    sys.modules[engine.__name__] = engine


install()
