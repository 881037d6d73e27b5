"""The embedded engine's speed on a random Llama of 200 M parameters, with its own kernels, with torch's, and beside
`transformers` with a static batch: prefill and decoding at several batch sizes.

Every run is a process of its own: `python -m tests.benchmarks.decode WAY DIRECTORY` prints JSON by batch size.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.synthetic import Shape, write_model

SHAPE = Shape(hidden=1024, intermediate=2816, layers=16, vocab=8192)
BATCHES = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 128, 33
FORMATS = {"bfloat16": "none", "int4_wo": "int4_wo"}
WAYS = ("bfloat16", "bfloat16, torch's kernels", "int4_wo", "int4_wo, torch's kernels", "transformers, bfloat16")
_TORCH = ", torch's kernels"
_VARIABLE = "TRTFORGE_KERNELS"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Measured:
    """One way: tokens a second by batch size, medians. `prefill` at the largest batch."""

    way: str
    decode: dict[int, float]
    prefill: float


def measure(directory: Path, runs: int) -> list[Measured]:
    """Every way `runs` times in turns, each in a process of its own."""
    _prepare(directory)
    found: dict[str, list[dict[str, dict[str, float]]]] = {way: [] for way in WAYS}
    for _ in range(runs):
        for way in WAYS:
            command = (sys.executable, "-m", "tests.benchmarks.decode", way, str(directory))
            done = subprocess.run(
                command, cwd=_ROOT, env=_environment(way), capture_output=True, text=True, check=True, timeout=600
            )
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    return [_median(way, results) for way, results in found.items()]


def _median(way: str, results: Sequence[dict[str, dict[str, float]]]) -> Measured:
    decode = {batch: statistics.median(each[str(batch)]["decode"] for each in results) for batch in BATCHES}
    prefill = statistics.median(each[str(BATCHES[-1])]["prefill"] for each in results)
    return Measured(way, decode, prefill)


def _environment(way: str) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name != _VARIABLE}
    return kept | ({_VARIABLE: "torch"} if way.endswith(_TORCH) else {})


def _prepare(directory: Path) -> None:
    """The checkpoint and an engine for each way that has one."""
    write_model(directory / "model", SHAPE)
    for format in FORMATS.values():
        converted = str(directory / f"checkpoint-{format}")
        _trtforge("convert", str(directory / "model"), converted, "--quant", format)
    for way in WAYS[:-1]:
        checkpoint = directory / f"checkpoint-{FORMATS[way.removesuffix(_TORCH)]}"
        limits = ("--max-batch-size", str(BATCHES[-1]), "--max-seq-len", "512", "--compute-dtype", "bfloat16")
        _trtforge("compile", str(checkpoint), str(directory / way), *limits, way=way)


def _trtforge(*words: str, way: str = "") -> None:
    command = (sys.executable, "-m", "trtforge", *words, "--quiet")
    subprocess.run(command, env=_environment(way), check=True, capture_output=True, timeout=600)


def prompts(batch: int) -> list[tuple[int, ...]]:
    """Random tokens, the same for every way."""
    rng = random.Random(batch)
    return [tuple(rng.randrange(4, SHAPE.vocab) for _ in range(PROMPT_TOKENS)) for _ in range(batch)]


Generate = Callable[[Sequence[tuple[int, ...]], int], None]


def timed(generate: Generate, batch: int) -> dict[str, float]:
    """Tokens a second: `prefill` from the time to the first token, `decode` from the rest."""
    asked = prompts(batch)
    start = time.perf_counter()
    generate(asked, 1)
    first = time.perf_counter() - start
    start = time.perf_counter()
    generate(asked, NEW_TOKENS)
    rest = time.perf_counter() - start - first
    return {"prefill": batch * PROMPT_TOKENS / first, "decode": batch * (NEW_TOKENS - 1) / rest}


def _by_engine(directory: Path) -> dict[int, dict[str, float]]:
    from trtforge.engine_process.requests import GenerationRequest
    from trtforge.runtime.engine import Engine, EngineOptions
    from trtforge.runtime.generate import generate_with

    with Engine.load(directory, EngineOptions(kv_reuse=False)) as engine:

        def generate(asked: Sequence[tuple[int, ...]], new: int) -> None:
            requests = [GenerationRequest(f"{new}-{index}", prompt, new) for index, prompt in enumerate(asked)]
            generate_with(engine, requests)

        generate(prompts(BATCHES[-1]), 4)
        return {batch: timed(generate, batch) for batch in BATCHES}


def _by_transformers(model: Path) -> dict[int, dict[str, float]]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def generate(asked: Sequence[tuple[int, ...]], new: int) -> None:
        ids = torch.tensor(asked)
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            loaded.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    generate(prompts(BATCHES[-1]), 4)
    return {batch: timed(generate, batch) for batch in BATCHES}


if __name__ == "__main__":
    way, directory = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(_by_transformers(directory / "model") if way == WAYS[-1] else _by_engine(directory / way)))
