"""What choosing the tokens of a step takes with a large vocabulary: the engine's sampler and the processors of
`transformers`, on the same logits.

32 rows of 128,256 tokens. Of steep logits a few tokens have most of the probability, as where a model is sure; of flat
ones thousands have, as at a high temperature.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trtforge.engine_process.requests import GenerationRequest, SamplingParams
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.sampler import Sampler
from trtforge.runtime.scheduling.sequence import Sequence

ROWS, VOCABULARY, PROMPT = 32, 128_256, 512
OPTIONS = {
    "temperature": SamplingParams(temperature=0.8, top_p=1.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k, top_p": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "top_p, repetition penalty": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1),
}
KERNELS, TORCH, TRANSFORMERS = "kernels", "torch's operations", "transformers"


@dataclass(frozen=True)
class Chosen:
    """Median seconds of a step by each way, of one kind of logits and of requests with these options."""

    logits: str
    options: str
    seconds: dict[str, float]


def measure(runs: int) -> tuple[Chosen, ...]:
    """Every way `runs` times, in turns."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(ROWS, VOCABULARY, generator=generator)
    likely = torch.randint(VOCABULARY, (ROWS, 20), generator=generator)
    steep = (3 * flat).scatter_add(1, likely, 6 + 12 * torch.rand(ROWS, 20, generator=generator))
    prompts = torch.randint(VOCABULARY, (ROWS, PROMPT), generator=generator)
    return tuple(
        _measured(name, options, logits, prompts, runs)
        for name, logits in (("steep", steep), ("flat", flat))
        for options in OPTIONS
    )


def _measured(name: str, options: str, logits: Tensor, prompts: Tensor, runs: int) -> Chosen:
    params = OPTIONS[options]
    rows = [
        Sequence.of(GenerationRequest("", tuple(prompt), 100, replace(params, seed=seed)), 0, 1000, lambda output: None)
        for seed, prompt in enumerate(prompts.tolist())
    ]
    with patch.dict(os.environ, {VARIABLE: "torch"}):
        by_torch = Sampler(VOCABULARY, torch.device("cpu"))
    processors = _processors(params)
    ways: dict[str, Callable[[Tensor], object]] = {
        KERNELS: lambda given: own.sample(rows, given),
        TORCH: lambda given: by_torch.sample(rows, given),
        TRANSFORMERS: lambda given: torch.multinomial(processors(prompts, given).softmax(1), 1),
    }
    own = Sampler(VOCABULARY, torch.device("cpu"))
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for run in range(runs + 1):  # the first finds what is kept of the prompts
        for way, choose in ways.items():
            given = logits.clone()
            start = time.perf_counter()
            choose(given)
            if run:
                taken[way].append(time.perf_counter() - start)
    return Chosen(name, options, {way: median(seconds) for way, seconds in taken.items()})


def _processors(params: SamplingParams) -> LogitsProcessorList:
    """In the order of `transformers`' generate."""
    found = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    found.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(TopPLogitsWarper(params.top_p))
    return found


def main() -> None:
    """Print a line for each kind of logits and each choice of options."""
    for found in measure(runs=7):
        own = found.seconds[KERNELS]
        times = ", ".join(
            f"{way} {seconds / own:.1f} times" for way, seconds in found.seconds.items() if way != KERNELS
        )
        print(f"{found.logits} logits, {found.options}: {own * 1000:.1f} ms for {ROWS} rows; {times}")


if __name__ == "__main__":
    main()
