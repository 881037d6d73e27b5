"""The embedded engine's speed on a random Llama of 200 M parameters: prefill and decoding at several batch sizes.

Beside it `transformers` with a static batch and, where `make bench-peers` installed it, OpenVINO GenAI with continuous
batching, both on the same weights; and what the machine reads and multiplies at best, measured between them.
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
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.by_field import by_field
from tests.benchmarks.limits import Limits, Probe
from tests.benchmarks.synthetic import Shape, write_model
from trtforge.core.dtypes import dtype_named
from trtforge.machine.host import Host, usable_cpus
from trtforge.machine.processor import Processor, compute_dtype

SHAPE = Shape(hidden=1024, intermediate=2816, layers=16, vocab=8192, heads=16, kv_heads=4, head_size=64)
BATCHES = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 128, 65
COMPUTE = compute_dtype("auto", "bfloat16", "cpu", Processor.of(Host()))
"""The engine's choice for bfloat16 weights on this processor; `transformers` computes in the same type."""
OURS = ("bfloat16", "int4_awq", "int4_awq, int8 activations", "int8_sq", "fp8")
TORCH = ("bfloat16, torch's kernels", "int4_awq, torch's kernels")
TRANSFORMERS = f"transformers, {COMPUTE}"
OPENVINO = ("OpenVINO, bfloat16", "OpenVINO, int8", "OpenVINO, int4")
OPENVINO_PYTHON = Path(__file__).parents[2] / ".venv-openvino" / "bin" / "python"
_FORMATS = {"bfloat16": "none"}
_KERNELS = ", torch's kernels"
_ROUNDED = ", int8 activations"
_VARIABLE = "TRTFORGE_KERNELS"
_ROOT = Path(__file__).parents[2]
_PEER = Path(__file__).with_name("openvino_peer.py")

Rates = dict[str, dict[str, float]]
"""Tokens a second by batch size, then `prefill` or `decode`."""


@dataclass(frozen=True)
class Measured:
    """One way: tokens a second by batch size, medians. `prefill` at the largest batch. `shares`: see `shares`."""

    way: str
    decode: dict[int, float]
    prefill: float
    shares: tuple[float, float] = (0.0, 0.0)


def measure(directory: Path, runs: int) -> tuple[list[Measured], Limits]:
    """Every way `runs` times in turns, each in a process of its own; and the machine's limits, medians.

    The limits are measured between the ways, because the machine's speed changes: a way's shares are of the better ones
    before and after it.
    """
    ways = [*OURS, *TORCH, TRANSFORMERS, *(OPENVINO if OPENVINO_PYTHON.exists() else ())]
    _prepare(directory, ways)
    probe = Probe(directory)
    found: dict[str, list[Rates]] = {way: [] for way in ways}
    around: dict[str, list[Limits]] = {way: [] for way in ways}
    limits = [probe.measure(usable_cpus())]
    for _ in range(runs):
        for way in ways:
            found[way].append(run(way, directory))
            limits.append(probe.measure(usable_cpus()))
            around[way].append(by_field(max, limits[-2:]))
    measured = [replace(median(way, found[way]), shares=shares(way, found[way], around[way])) for way in ways]
    return measured, by_field(statistics.median, limits)


def run(way: str, directory: Path) -> Rates:
    """One way, once, in a process of its own."""
    command = (sys.executable, "-m", "tests.benchmarks.decode", way, str(directory))
    if way in OPENVINO:
        command = (str(OPENVINO_PYTHON), str(_PEER), "run", str(directory / way), str(directory / "cases.json"))
    done = subprocess.run(
        command, cwd=_ROOT, env=_environment(way), capture_output=True, text=True, check=True, timeout=900
    )
    printed = json.loads(done.stdout.splitlines()[-1])
    return _rates(printed) if way in OPENVINO else printed


def median(way: str, results: Sequence[Rates]) -> Measured:
    """The medians of its runs."""
    decode = {batch: statistics.median(each[str(batch)]["decode"] for each in results) for batch in BATCHES}
    prefill = statistics.median(each[str(BATCHES[-1])]["prefill"] for each in results)
    return Measured(way, decode, prefill)


def _environment(way: str) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name != _VARIABLE}
    return kept | ({_VARIABLE: "torch"} if way.endswith(_KERNELS) else {})


def _prepare(directory: Path, ways: Sequence[str]) -> None:
    """The checkpoints, and an engine or a model for each way that has one."""
    model = directory / "model"
    write_model(model, SHAPE)
    for way in OURS:
        if way.endswith(_ROUNDED):
            continue
        quant = _FORMATS.get(way, way)
        calibration = _calibration(directory, model, quant)
        run_trtforge("convert", str(model), str(directory / f"checkpoint-{way}"), "--quant", quant, *calibration)
    for way in (*OURS, *TORCH):
        checkpoint = directory / f"checkpoint-{way.removesuffix(_KERNELS).removesuffix(_ROUNDED)}"
        options = ["--max-batch-size", str(BATCHES[-1]), "--max-seq-len", "512"]
        options += ["--int8-activations"] if way.endswith(_ROUNDED) else []
        run_trtforge("compile", str(checkpoint), str(directory / way), *options, way=way)
    openvino = [way for way in OPENVINO if way in ways]
    if openvino:
        _write_tokenizer(model)
        (directory / "cases.json").write_text(json.dumps(_cases()))
    for way in openvino:
        command = (str(OPENVINO_PYTHON), str(_PEER), "export", str(model), str(directory / way), way.split(", ")[1])
        subprocess.run(command, check=True, capture_output=True, timeout=600)


def _calibration(directory: Path, model: Path, quant: str) -> tuple[str, ...]:
    """The options that give a calibration to `convert`; it is made on random tokens."""
    if quant == "none":
        return ()
    import torch
    from safetensors.torch import save_file

    ids = directory / "ids.safetensors"
    save_file({"input_ids": torch.randint(4, SHAPE.vocab, (4, 128), generator=torch.Generator().manual_seed(0))}, ids)
    out = directory / f"calibration-{quant}"
    sizes = ("--samples", "4", "--seq-len", "128")
    run_trtforge("calibrate", str(model), str(out), "--quant", quant, "--data", str(ids), *sizes)
    return "--calibration", str(out)


def _write_tokenizer(model: Path) -> None:
    """A word for every token: OpenVINO GenAI loads no model without a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(SHAPE.vocab)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1").save_pretrained(model)


def run_trtforge(*words: str, way: str = "") -> None:
    command = (sys.executable, "-m", "trtforge", *words, "--quiet")
    done = subprocess.run(command, env=_environment(way), check=False, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"trtforge {' '.join(words)}: {done.stderr}")


def prompts(batch: int) -> list[tuple[int, ...]]:
    """Random tokens, the same for every way."""
    rng = random.Random(batch)
    return [tuple(rng.randrange(4, SHAPE.vocab) for _ in range(PROMPT_TOKENS)) for _ in range(batch)]


def _cases() -> list[dict[str, object]]:
    """What `timed` asks for at every batch size, after a warm-up."""
    asked = [(prompts(BATCHES[-1]), 4), *((prompts(batch), new) for batch in BATCHES for new in (1, NEW_TOKENS))]
    return [{"prompts": each, "new": new} for each, new in asked]


def _rates(seconds: Sequence[float]) -> Rates:
    """The rates of `_cases`."""
    pairs = zip(BATCHES, seconds[1::2], seconds[2::2], strict=True)
    return {str(batch): _rate(batch, first, whole) for batch, first, whole in pairs}


def _rate(batch: int, first: float, whole: float) -> dict[str, float]:
    """`prefill` from the time to the first token, `decode` from the rest."""
    return {"prefill": batch * PROMPT_TOKENS / first, "decode": batch * (NEW_TOKENS - 1) / (whole - first)}


Generate = Callable[[Sequence[tuple[int, ...]], int], None]


def timed(generate: Generate, batch: int) -> dict[str, float]:
    """Tokens a second."""
    asked = prompts(batch)
    seconds = []
    for new in (1, NEW_TOKENS):
        start = time.perf_counter()
        generate(asked, new)
        seconds.append(time.perf_counter() - start)
    return _rate(batch, *seconds)


def _by_engine(directory: Path) -> dict[int, dict[str, float]]:
    from trtforge.engine_process.requests import GenerationRequest
    from trtforge.runtime.engine import Engine, EngineOptions
    from trtforge.runtime.generate import generate_with

    with Engine.load(directory, EngineOptions(kv_reuse=False)) as engine:

        def generate(asked: Sequence[tuple[int, ...]], new: int) -> None:
            requests = [GenerationRequest(f"{new}-{index}", prompt, new) for index, prompt in enumerate(asked)]
            for made in generate_with(engine, requests):
                if len(made.tokens) != new:
                    raise RuntimeError(made.error or f"{len(made.tokens)} tokens")

        generate(prompts(BATCHES[-1]), 4)
        return {batch: timed(generate, batch) for batch in BATCHES}


def _by_transformers(model: Path) -> dict[int, dict[str, float]]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, COMPUTE))

    def generate(asked: Sequence[tuple[int, ...]], new: int) -> None:
        ids = torch.tensor(asked)
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            loaded.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    generate(prompts(BATCHES[-1]), 4)
    return {batch: timed(generate, batch) for batch in BATCHES}


def bytes_of_step(
    way: str,
    shape: Shape = SHAPE,
    context: int = PROMPT_TOKENS + NEW_TOKENS // 2,
    itemsize: int = 2,
    batch: int = 1,
) -> float:
    """Bytes of weights, and of every request's KV cache of `itemsize` a number, that are read to decode one token of
    each."""
    plain = 32 if "float32" in way else 16
    bits = 4 + 32 / 128 if "int4" in way else 8 if "int8" in way or "fp8" in way else plain
    head = shape.vocab * shape.hidden * plain / 8
    cached = shape.layers * 2 * shape.kv_heads * shape.head_size * itemsize * context
    return multiply_adds_of_layers(shape) * bits / 8 + head + batch * cached


def seconds_of_token(way: str, limits: Limits) -> float:
    """Of the products of the linear layers and the LM head at the peaks of their types. The head stays in bfloat16."""
    layers = limits.int8 or limits.bfloat16 if "int8" in way else limits.bfloat16
    return multiply_adds_of_layers() / layers + SHAPE.vocab * SHAPE.hidden / limits.bfloat16


def multiply_adds_of_layers(shape: Shape = SHAPE) -> float:
    """Of the linear layers."""
    return multiply_adds_of_token(shape) - shape.vocab * shape.hidden


def multiply_adds_of_token(shape: Shape = SHAPE) -> float:
    """Of the linear layers and the LM head."""
    shapes = [spec.shape for spec in shape.tensors() if len(spec.shape) == 2 and "embed" not in spec.name]
    return float(sum(rows * columns for rows, columns in shapes))


def shares(way: str, results: Sequence[Rates], limits: Sequence[Limits]) -> tuple[float, float]:
    """Of the memory's bandwidth by one request, and of the tighter limit by the largest batch.

    A step of the batch is limited by what it reads or by its products, where these are slower. Medians of the runs,
    each beside the limits around it.
    """
    batch, itemsize = BATCHES[-1], dtype_named(COMPUTE).size
    read = bytes_of_step(way, itemsize=itemsize)
    alone, together = [], []
    for rates, each in zip(results, limits, strict=True):
        step = bytes_of_step(way, itemsize=itemsize, batch=batch) / each.bandwidth
        token = max(seconds_of_token(way, each), step / batch)
        alone.append(rates[str(BATCHES[0])]["decode"] * read / each.bandwidth)
        together.append(rates[str(batch)]["decode"] * token)
    return statistics.median(alone), statistics.median(together)


if __name__ == "__main__":
    way, directory = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(_by_transformers(directory / "model") if way == TRANSFORMERS else _by_engine(directory / way)))
