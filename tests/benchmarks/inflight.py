"""In-flight against static batching on the same engine and the same load.

128 requests arrive together: prompts of 16 to 48 tokens, output lengths geometric with mean 64, at most 256; batch 32.
A static batch is admitted when the one before is done, and is done when its longest row is: `padded` goes on computing
finished rows until then, as padding does; `dropped` computes only what is left, which few static servers do.
"""

import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.scheduling.scheduler import Batching

REQUESTS, BATCH_SIZE, PROMPT_TOKENS, MEAN_OUTPUT, MOST_OUTPUT = 128, 32, 32, 64, 256
VARIANTS: tuple[Batching, ...] = ("inflight", "static_padded", "static_dropped")


@dataclass(frozen=True)
class Measured:
    """One variant's runs. `steps` of the engine; tokens that were asked for per second, one figure a run."""

    batching: Batching
    tokens: int
    steps: int
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.rates)


def load(vocab_size: int, seed: int = 0) -> list[GenerationRequest]:
    """The requests, the same for every variant."""
    rng = random.Random(seed)
    made = []
    for index in range(REQUESTS):
        length = rng.randint(PROMPT_TOKENS // 2, PROMPT_TOKENS * 3 // 2)
        prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
        output = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / MEAN_OUTPUT))
        made.append(GenerationRequest(str(index), prompt, min(MOST_OUTPUT, output)))
    return made


def measure(directory: Path, vocab_size: int, runs: int) -> list[Measured]:
    """Every variant `runs` times, interleaved, each after a warm-up."""
    rates: dict[Batching, list[float]] = {batching: [] for batching in VARIANTS}
    steps: dict[Batching, int] = {}
    requests = load(vocab_size)
    for _ in range(runs):
        for batching in VARIANTS:
            options = EngineOptions(batching=batching, kv_reuse=False, chunked_context=True, max_batch_size=BATCH_SIZE)
            with Engine.load(directory, options) as engine:
                generate_with(engine, [GenerationRequest(r.request_id, r.prompt, 4) for r in requests[:BATCH_SIZE]])
                before = engine.statistics().iterations
                start = time.perf_counter()
                made = generate_with(engine, requests)
                seconds = time.perf_counter() - start
                steps[batching] = engine.statistics().iterations - before
            tokens = sum(len(generation.tokens) for generation in made)
            rates[batching].append(tokens / seconds)
    return [Measured(batching, tokens, steps[batching], tuple(rates[batching])) for batching in VARIANTS]
