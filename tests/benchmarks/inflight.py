"""In-flight against static batching on the same engine and the same load, and `transformers`' own ways beside them.

128 requests arrive together: prompts of 16 to 48 tokens, output lengths geometric with mean 64, at most 256; batch 32.
A static batch is admitted when the one before is done, and is done when its longest row is: `padded` goes on computing
finished rows until then, as padding does; `dropped` computes only what is left, which few static servers do.
`transformers` computes static batches padded, and the first 32 requests with its continuous batching, both in float32.
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.scheduling.batch_limits import Batching

REQUESTS, BATCH_SIZE, PROMPT_TOKENS, MEAN_OUTPUT, MOST_OUTPUT = 128, 32, 32, 64, 256
VARIANTS: tuple[Batching, ...] = ("inflight", "static_padded", "static_dropped")
STATIC, CONTINUOUS = "static batches", "continuous batching"
"""Ways of `transformers`."""


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
            if tokens != sum(request.max_tokens for request in requests):
                raise RuntimeError(next(each.error for each in made if each.error) or f"{tokens} tokens")
            rates[batching].append(tokens / seconds)
    return [Measured(batching, tokens, steps[batching], tuple(rates[batching])) for batching in VARIANTS]


def measure_transformers(model: Path, vocab_size: int, runs: int) -> dict[str, tuple[float, ...]]:
    """Tokens that were asked for per second, of each way of `transformers`, one figure a run."""
    import torch
    from transformers import AutoModelForCausalLM

    requests = load(vocab_size)
    rates: dict[str, list[float]] = {STATIC: [], CONTINUOUS: []}
    for _ in range(runs):
        for way, generate, asked in (
            (STATIC, _static_batches, requests),
            (CONTINUOUS, _continuous_batching, requests[:BATCH_SIZE]),
        ):
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
            start = time.perf_counter()
            generate(loaded, asked)
            rates[way].append(sum(request.max_tokens for request in asked) / (time.perf_counter() - start))
    return {way: tuple(each) for way, each in rates.items()}


def _static_batches(model: Any, requests: Sequence[GenerationRequest]) -> None:
    """Prompts padded on the left; each batch until its longest answer is done."""
    import torch

    for start in range(0, len(requests), BATCH_SIZE):
        batch = requests[start : start + BATCH_SIZE]
        longest = max(len(request.prompt) for request in batch)
        ids = torch.tensor([[0] * (longest - len(each.prompt)) + list(each.prompt) for each in batch])
        mask = torch.tensor([[0] * (longest - len(each.prompt)) + [1] * len(each.prompt) for each in batch])
        new = max(request.max_tokens for request in batch)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )


def _continuous_batching(model: Any, requests: Sequence[GenerationRequest]) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=MOST_OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        for request in requests:
            manager.add_request(list(request.prompt), request.request_id, max_new_tokens=request.max_tokens)
        waiting = {request.request_id: request.max_tokens for request in requests}
        while waiting:
            result = manager.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"transformers' continuous batching: {result and result.error}")
            if result.is_finished() and waiting.pop(result.request_id) != len(result.generated_tokens):
                raise RuntimeError(f"transformers' continuous batching: {len(result.generated_tokens)} tokens")
