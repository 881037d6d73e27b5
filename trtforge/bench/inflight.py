"""In-flight against static batching on one engine: `python -m trtforge.bench.inflight ENGINE`.

The load is 128 requests that arrive together, prompts around 32 tokens, outputs of geometric length (mean 64, at most
256), batches of 32. A static batch ends with its longest row; its finished rows are computed as padding until then,
or dropped, which few servers with static batches do.
"""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.requests import GenerationRequest
from trtforge.runtime.scheduler import Batching

_VARIANTS: tuple[Batching, ...] = ("static_padded", "static_dropped", "inflight")


@dataclass(frozen=True)
class Load:
    """What is asked of the engine."""

    requests: int = 128
    batch_size: int = 32
    prompt_tokens: int = 32
    mean_output: int = 64
    most_output: int = 256
    vocab_size: int = 1000
    seed: int = 0

    def draw(self) -> list[GenerationRequest]:
        """The requests, the same for every variant."""
        rng = random.Random(self.seed)
        made = []
        for index in range(self.requests):
            length = rng.randint(self.prompt_tokens // 2, self.prompt_tokens * 3 // 2)
            prompt = tuple(rng.randrange(self.vocab_size) for _ in range(length))
            output = min(self.most_output, max(1, round(rng.expovariate(1 / self.mean_output))))
            made.append(GenerationRequest(str(index), prompt, output))
        return made


@dataclass(frozen=True)
class Measured:
    """What one variant did. `steps` is what it would need on a device whose steps cost the same at any batch."""

    batching: Batching
    tokens: int
    seconds: float
    steps: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def measure(directory: Path, batching: Batching, load: Load, threads: int | None = None) -> Measured:
    """Serve the load once, after a short warm-up."""
    options = EngineOptions(
        batching=batching, kv_reuse=False, chunked_context=True, threads=threads, max_batch_size=load.batch_size
    )
    requests = load.draw()
    with Engine.load(directory, options) as engine:
        generate_with(engine, [GenerationRequest(r.request_id, r.prompt, 4) for r in requests[: load.batch_size]])
        before = engine.statistics().iterations
        start = time.perf_counter()
        made = generate_with(engine, requests)
        seconds = time.perf_counter() - start
        steps = engine.statistics().iterations - before
    return Measured(batching, sum(len(generation.tokens) for generation in made), seconds, steps)


def main(arguments: list[str]) -> int:
    """Print all variants and how much faster in-flight batching is than each static one."""
    if len(arguments) != 1:
        print("usage: python -m trtforge.bench.inflight ENGINE", file=sys.stderr)
        return 2
    load = Load()
    try:
        results = [measure(Path(arguments[0]), batching, load) for batching in _VARIANTS]
    except ForgeError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 1
    inflight = results[-1]
    for result in results:
        ratio = f"in-flight is {inflight.rate / result.rate:.2f}x as fast" if result is not inflight else ""
        print(
            f"{result.batching:15} {result.tokens} tokens in {result.seconds:6.2f} s: {result.rate:7.0f} tokens/s, "
            f"{result.steps:4} steps  {ratio}".rstrip()
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
