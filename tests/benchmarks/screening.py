"""What screening the tokens of a large LM head gains: one request, with and without it, in INT4 and bfloat16.

The network has the sizes of Qwen2.5-0.5B, its vocabulary of 151,936 tokens included, and random weights.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.benchmarks.decode import run_trtforge
from tests.benchmarks.synthetic import Shape, write_model
from trtforge.engine_process.requests import GenerationRequest, SamplingParams
from trtforge.models import kernels
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with

SHAPE = Shape(hidden=896, intermediate=4864, layers=24, vocab=151_936, heads=14, kv_heads=2, head_size=64)
FORMATS = ("int4_wo", "none")
CHOICES = {"greedy": SamplingParams(), "drawn from all": SamplingParams(temperature=1.0, top_p=1.0, seed=1)}
PROMPT, NEW_TOKENS = 32, 129
_NEVER = 1 << 62  # bytes of an LM head that is screened


@contextmanager
def engines(directory: Path) -> Iterator[dict[bool, Engine]]:
    """By whether tokens are screened."""
    with ExitStack() as stack:
        found = {True: stack.enter_context(Engine.load(directory, EngineOptions(kv_reuse=False)))}
        with patch.object(kernels, "_SCREENED_BYTES", _NEVER):
            found[False] = stack.enter_context(Engine.load(directory, EngineOptions(kv_reuse=False)))
        yield found


def measure(quant: str, runs: int) -> dict[tuple[str, bool], float]:
    """Median tokens a second after the first one, by how they are chosen and whether they are screened, in turns."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory / "model", SHAPE)
        run_trtforge("convert", str(directory / "model"), str(directory / "checkpoint"), "--quant", quant)
        limits = ("--max-batch-size", "1", "--max-seq-len", "512")
        run_trtforge("compile", str(directory / "checkpoint"), str(directory / "engine"), *limits)
        with engines(directory / "engine") as loaded:
            taken: dict[tuple[str, bool], list[float]] = {(how, which): [] for how in CHOICES for which in loaded}
            for run in range(runs + 1):  # the first records the steps
                for how, screened in taken:
                    engine = loaded[screened]
                    seconds = _seconds(engine, NEW_TOKENS, how, run) - _seconds(engine, 1, how, run)
                    if run:
                        taken[how, screened].append(seconds)
    return {which: (NEW_TOKENS - 1) / statistics.median(each) for which, each in taken.items()}


def _seconds(engine: Engine, tokens: int, how: str, run: int) -> float:
    request = GenerationRequest("0", tuple(range(10 + run, 10 + run + PROMPT)), tokens, CHOICES[how])
    start = time.perf_counter()
    (made,) = generate_with(engine, [request])
    if len(made.tokens) != tokens:
        raise RuntimeError(made.error or f"{len(made.tokens)} tokens")
    return time.perf_counter() - start


def main() -> None:
    """Print a line for each format and choice."""
    for quant in FORMATS:
        rates = measure(quant, runs=5)
        for how in CHOICES:
            screened, without = rates[how, True], rates[how, False]
            times = f"{screened / without:.2f} times"
            print(f"{quant}, {how}: {screened:.1f} tokens/s screened, {without:.1f} without: {times}")


if __name__ == "__main__":
    main()
