"""The embedded engine on a GPU: random Llamas of 1 to 8 billion parameters in bfloat16, FP8 and INT4.

INT4 is weight-only: it is computed like INT4-AWQ, and needs no search for scales, which takes long for 8 billion.

Decoding of one request as a share of the memory's bandwidth, of 64 requests against `transformers`, and prompts as a
share of the peak of matrix products; both limits are measured in the same run. Every run is a process of its own:
`python -m tests.benchmarks.gpu WAY DIRECTORY MODEL DEVICE` prints JSON. With device cpu and the model `tiny` all of it
runs on a CPU.
"""

import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.by_field import by_field
from tests.benchmarks.decode import bytes_of_step, multiply_adds_of_layers, run_trtforge
from tests.benchmarks.synthetic import Shape, write_model
from trtforge.core.device import UsableDevice


@dataclass(frozen=True)
class Model:
    """A random Llama and its load: `together` requests at once; prompts and answers in tokens."""

    shape: Shape
    together: int = 64
    prompt: int = 128
    new: int = 65
    long_prompt: int = 2048


MODELS = {
    "1B": Model(Shape(hidden=2048, intermediate=8192, layers=16, vocab=128256, heads=32, head_size=64)),
    "3B": Model(Shape(hidden=3072, intermediate=8192, layers=28, vocab=128256)),
    "8B": Model(Shape(hidden=4096, intermediate=14336, layers=32, vocab=128256)),
}
"""Of the sizes of Llama 3.1 and 3.2, their LM heads apart from the embedding."""
TINY = {
    "tiny": Model(Shape(256, 512, layers=2, vocab=512, heads=4, kv_heads=2, head_size=64), 4, 16, 9, 64),
}
FORMATS = ("bfloat16", "fp8", "int4_wo")
TRANSFORMERS, LIMITS = "transformers", "limits"
_QUANT = {"bfloat16": "none"}
_CALIBRATED = ("fp8",)
_PRODUCTS = {"fp8": "fp8"}  # of which limit a format's products are a share; else of bfloat16's
_ROOT = Path(__file__).parents[2]
_SIDES = {"cuda": 8192, "cpu": 512}
_COPIED = {"cuda": 1 << 32, "cpu": 1 << 26}  # bytes


@dataclass(frozen=True)
class Limits:
    """A second's bytes that a copy reads and writes, and multiply-adds of square products; 0 where there are none."""

    bandwidth: float
    bfloat16: float
    fp8: float


@dataclass(frozen=True)
class Rates:
    """Tokens a second: decoded for one request and for many, and of prompts."""

    alone: float
    together: float
    prompts: float


@dataclass(frozen=True)
class Measured:
    """One model in one format; `peer`: `transformers` in bfloat16."""

    model: str
    format: str
    rates: Rates
    peer: Rates


def measure(
    directory: Path, models: dict[str, Model], formats: Sequence[str], device: UsableDevice, runs: int
) -> tuple[list[Measured], Limits]:
    """Every format of the models and `transformers`, `runs` times in turns; and the best limits of the runs."""
    found, limits = [], []
    for name, model in models.items():
        work = directory / name
        _prepare(work, model, formats, device)
        rates: dict[str, list[Rates]] = {way: [] for way in (*formats, TRANSFORMERS)}
        for _ in range(runs):
            limits.append(Limits(**_run(LIMITS, work, name, device)))
            for way in rates:
                rates[way].append(Rates(**_run(way, work, name, device)))
        medians = {way: by_field(statistics.median, each) for way, each in rates.items()}
        found += [Measured(name, way, medians[way], medians[TRANSFORMERS]) for way in formats]
        shutil.rmtree(work)
    return found, by_field(max, limits)


def shares(measured: Measured, model: Model, limits: Limits) -> tuple[float, float]:
    """Of the bandwidth by one request, and of the peak of products by prompts, of which one token needs logits."""
    shape, read = model.shape, bytes_of_step(measured.format, model.shape, model.prompt + model.new // 2)
    peak = limits.fp8 if measured.format in _PRODUCTS and limits.fp8 else limits.bfloat16
    products = measured.rates.prompts * multiply_adds_of_layers(shape)
    return measured.rates.alone * read / limits.bandwidth, products / peak


def measure_limits(device: UsableDevice) -> Limits:
    """By a copy that is larger than any cache, and by products of large square matrices."""
    import torch

    source = torch.ones(_COPIED[device] // 2, dtype=torch.bfloat16, device=device)
    target, side = torch.empty_like(source), _SIDES[device]
    bandwidth = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    bfloat16 = side**3 / _seconds(lambda: left @ right, device)
    if device == "cpu" or torch.cuda.get_device_capability() < (8, 9):
        return Limits(bandwidth, bfloat16, 0.0)
    one, codes, columns = (torch.ones((), device=device), left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn))
    multiply = lambda: torch._scaled_mm(codes, columns.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return Limits(bandwidth, bfloat16, side**3 / _seconds(multiply, device))


def _seconds(compute: Callable[[], object], device: UsableDevice) -> float:
    """The shortest of some runs after the first."""
    import torch

    found = []
    for _ in range(6):
        start = time.perf_counter()
        compute()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _run(way: str, directory: Path, model: str, device: UsableDevice) -> dict[str, float]:
    command = (sys.executable, "-m", "tests.benchmarks.gpu", way, str(directory), model, device)
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    printed: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return printed


def _prepare(directory: Path, model: Model, formats: Sequence[str], device: UsableDevice) -> None:
    """The model and an engine of each format, which are made at the same time."""
    source = directory / "model"
    write_model(source, model.shape)
    longest = model.long_prompt + model.new
    limits = ("--max-batch-size", str(model.together), "--max-seq-len", str(longest), "--compute-dtype", "bfloat16")

    def make(way: str) -> None:
        quant, checkpoint = _QUANT.get(way, way), directory / f"checkpoint-{way}"
        calibration = _calibration(directory, model, quant, device)
        run_trtforge("convert", str(source), str(checkpoint), "--quant", quant, *calibration)
        run_trtforge("compile", str(checkpoint), str(directory / way), "--device", device, *limits)
        shutil.rmtree(checkpoint)

    with ThreadPoolExecutor(len(formats)) as pool:
        list(pool.map(make, formats))


def _calibration(directory: Path, model: Model, quant: str, device: UsableDevice) -> tuple[str, ...]:
    """The options that give a calibration on random tokens to `convert`."""
    if quant not in _CALIBRATED:
        return ()
    import torch
    from safetensors.torch import save_file

    ids, out = directory / f"ids-{quant}.safetensors", directory / f"calibration-{quant}"
    generator = torch.Generator().manual_seed(0)
    save_file({"input_ids": torch.randint(4, model.shape.vocab, (4, 128), generator=generator)}, ids)
    sizes = ("--samples", "4", "--seq-len", "128", "--device", device)
    run_trtforge("calibrate", str(directory / "model"), str(out), "--quant", quant, "--data", str(ids), *sizes)
    return "--calibration", str(out)


Prompts = list[tuple[int, ...]]
Generate = Callable[[Prompts, int], None]


def prompts(model: Model, count: int, length: int) -> Prompts:
    """Random tokens, the same for every way."""
    rng = random.Random(count)
    return [tuple(rng.randrange(4, model.shape.vocab) for _ in range(length)) for _ in range(count)]


def timed(generate: Generate, model: Model) -> Rates:
    """The rates of one way, after a warm-up of each, medians of three: decoding is what follows the first token."""
    loads = (prompts(model, 1, model.prompt), prompts(model, model.together, model.prompt))
    long = prompts(model, 1, model.long_prompt)
    decoded = []
    for asked in loads:
        for new in (1, model.new):
            generate(asked, new)
        whole, first = (_took(generate, asked, new) for new in (model.new, 1))
        decoded.append(len(asked) * (model.new - 1) / max(whole - first, 1e-9))
    generate(long, 1)
    return Rates(*decoded, prompts=model.long_prompt / _took(generate, long, 1))


def _took(generate: Generate, asked: Prompts, new: int) -> float:
    found = []
    for _ in range(3):
        start = time.perf_counter()
        generate(asked, new)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _by_engine(directory: Path, model: Model) -> Rates:
    from trtforge.engine_process.requests import GenerationRequest
    from trtforge.runtime.engine import Engine, EngineOptions
    from trtforge.runtime.generate import generate_with

    with Engine.load(directory, EngineOptions(kv_reuse=False)) as engine:

        def generate(asked: Prompts, new: int) -> None:
            requests = [GenerationRequest(str(index), prompt, new) for index, prompt in enumerate(asked)]
            for made in generate_with(engine, requests):
                if len(made.tokens) != new:
                    raise RuntimeError(made.error or f"{len(made.tokens)} tokens")

        return timed(generate, model)


def _by_transformers(directory: Path, model: Model, device: str) -> Rates:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)

    def generate(asked: Prompts, new: int) -> None:
        ids = torch.tensor(asked, device=device)
        with torch.inference_mode():
            made = loaded.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
            )
        made.cpu()  # waits for the GPU

    return timed(generate, model)


if __name__ == "__main__":
    way, where, name, device_name = sys.argv[1:]
    asked_model = (MODELS | TINY)[name]
    figures: Rates | Limits
    if way == LIMITS:
        figures = measure_limits("cuda" if device_name == "cuda" else "cpu")
    elif way == TRANSFORMERS:
        figures = _by_transformers(Path(where) / "model", asked_model, device_name)
    else:
        figures = _by_engine(Path(where) / way, asked_model)
    print(json.dumps(vars(figures)))
