"""Quality in and out of the calibration's domain: ours with each rounding, and NVIDIA ModelOpt's recipes.

Two models, each calibrated on text like its training's: the demo model (prose of Python's library) and another
architecture with another tokenizer, of Python code (second_model.py). Mean KL divergence and perplexity against float32
on held-out text of the same kind and of another (C++ headers, prose), with several calibration seeds. All calibrate on
the same windows. ModelOpt is simulated in `transformers`; its NVFP4 needs CUDA, but its codes are those of our rounding
to the nearest (tests/calibrate/test_modelopt.py). llm-compressor's GPTQ runs in an environment of its own (`make
bench-peers`), if there is one.
"""

import copy
import json
import statistics
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.divergence import Peer, compared
from tests.benchmarks.headers import write_headers
from tests.benchmarks.quality import with_groups
from tests.benchmarks.second_model import HELD_OUT, NAME, TRAINING, train
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.assets import asset_directory
from trtforge.core.recipe import CalibrationConfig, GateConfig
from trtforge.formats.corpus import token_windows
from trtforge.verify.stage import verify

SEEDS = (0, 1, 2)
SAMPLES, JUDGED, LENGTH = 64, 12, 512
OURS = (
    ("int4_awq", 64, "none"),
    ("int4_awq", 128, "none"),
    ("w4a8_awq", 128, "none"),
    ("nvfp4", 128, "none"),
    ("int4_wo", 0, "none"),
    ("none", 128, "fp8"),
)
"""Format, group size, format of the KV cache."""
PEERS = (("int4_awq", 64), ("int4_awq", 128), ("w4a8_awq", 128))
COMPRESSED = (("int4_awq", 64), ("int4_awq", 128), ("nvfp4", 128), ("int4_wo", 0))
"""Formats with the codes and scales of llm-compressor's schemes."""
PEERS_PYTHON = Path(".venv-llm-compressor/bin/python")
WAYS = ("compensated", "nearest", "modelopt", "llm-compressor")
_FULL = {"method": "awq_full"}  # AWQ's scales and a search for each block's clipping range


@dataclass(frozen=True)
class Domains:
    """A model, text to calibrate on, held-out text of the same kind and of another."""

    name: str
    model: Path
    data: str
    own: Path
    other: Path


@dataclass(frozen=True)
class Found:
    """One way's figures for each seed: mean KL divergence in nats, relative increase of perplexity; own domain, other
    domain."""

    format: str
    group: int
    way: str
    kl: tuple[tuple[float, ...], tuple[float, ...]]
    increase: tuple[tuple[float, ...], tuple[float, ...]]


def models(directory: Path) -> Iterator[Domains]:
    """Both models; the second one is trained below `directory`."""
    demo, second = asset_directory("recipes") / "demo-model", directory / "second"
    prose, headers = demo / "heldout.txt", write_headers(directory / "headers.txt")
    yield Domains("the demo model", demo, CalibrationConfig().data, prose, headers)
    if not (second / "config.json").exists():
        train(second)
    yield Domains(NAME, second, str(second / TRAINING), second / HELD_OUT, prose)


def measure(case: Domains, directory: Path, ways: Collection[str] = WAYS, seeds: Sequence[int] = SEEDS) -> list[Found]:
    """The named ways with one model."""
    found = []
    for format_, group, cache in OURS:
        methods = [method for method in ("compensated", "nearest") if method in ways]
        if format_ == "none":  # there is one way to a KV cache in FP8
            methods = [""] if "compensated" in ways else []
        if format_ == "int4_wo" and "nearest" in methods:
            methods.remove("nearest")
            built = [_converted(case, directory, "int4_wo", None)]
            found.append(_found("int4_wo", 0, "TensorRT-LLM's build", built))
        for method in methods:
            each = [_ours(case, directory, format_, group, cache, method, seed) for seed in seeds]
            name = format_ if cache == "none" else f"{cache} KV cache"
            found.append(_found(name, group, f"trtforge, {method}" if method else "trtforge", each))
    if "modelopt" in ways:
        found += _peers(case, seeds)
    if "llm-compressor" in ways and PEERS_PYTHON.exists():
        found += _compressed(case, directory, seeds)
    return found


def _found(format_: str, group: int, way: str, each: Sequence[tuple[Peer, Peer]]) -> Found:
    kl, increase = ([[getattr(run[at], what) for run in each] for at in (0, 1)] for what in ("kl", "increase"))
    return Found(format_, group, way, (tuple(kl[0]), tuple(kl[1])), (tuple(increase[0]), tuple(increase[1])))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, the smallest and the largest."""
    return statistics.median(values), min(values), max(values)


def _ours(
    case: Domains, directory: Path, format_: str, group: int, cache: str, method: str, seed: int
) -> tuple[Peer, Peer]:
    data = {"data": case.data, "samples": SAMPLES, "sequence_length": LENGTH, "seed": seed}
    settings: dict[str, Any] = {"format": format_, "group_size": group or 128, "kv_cache": cache, "data": data}
    if method:
        settings["rounding"] = method
    out = directory / f"{case.model.name}-{format_}-{group}-{cache}-{method}-{seed}"
    made = calibrate(CalibrateConfig.model_validate(settings), case.model, out / "calibration").path
    return _converted(case, out, format_, made, group or 128, cache)


def _converted(
    case: Domains, directory: Path, format_: str, calibration: Path | None, group: int = 128, cache: str = "none"
) -> tuple[Peer, Peer]:
    """In the own and in the other domain."""
    config = ConvertConfig.model_validate({"quant": format_, "group_size": group, "kv_cache": cache})
    out = directory / f"{case.model.name}-{format_}-checkpoint"
    checkpoint = convert(config, case.model, out, calibration=calibration).path
    own, other = (
        verify(checkpoint, case.model, GateConfig(samples=JUDGED, sequence_length=LENGTH, data=str(text)))
        for text in (case.own, case.other)
    )
    return Peer(own.perplexity.increase, own.kl_mean), Peer(other.perplexity.increase, other.kl_mean)


def _peers(case: Domains, seeds: Sequence[int]) -> Iterator[Found]:
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).eval()
    vocab = loaded.config.vocab_size
    judged = [
        token_windows(str(text), case.model, samples=JUDGED, length=LENGTH, vocab_size=vocab, seed=0, part="held_out")
        for text in (case.own, case.other)
    ]

    def run(preset: dict[str, Any], seed: int) -> tuple[Peer, Peer]:
        text = token_windows(case.data, case.model, samples=SAMPLES, length=LENGTH, vocab_size=vocab, seed=seed)
        batches = torch.tensor(text.windows).split(8)
        forward: Callable[[Any], Any] = lambda model: [model(ids) for ids in batches]  # noqa: E731
        with torch.no_grad():
            quantized = mtq.quantize(copy.deepcopy(loaded), preset, forward)
            own, other = (compared(quantized, loaded, held.windows) for held in judged)
        return own, other

    presets = {"int4_awq": mtq.INT4_AWQ_CFG, "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG}
    for format_, group in PEERS:
        preset = with_groups(presets[format_], group)
        preset["quant_cfg"].append({"quantizer_name": "*embed_out*", "enable": False})  # GPT-NeoX's output head
        yield _found(format_, group, "ModelOpt", [run(preset, seed) for seed in seeds])
        if format_ == "int4_awq":
            full = preset | {"algorithm": _FULL}
            yield _found(format_, group, "ModelOpt, awq_full", [run(full, seed) for seed in seeds])


def _compressed(case: Domains, directory: Path, seeds: Sequence[int]) -> Iterator[Found]:
    """llm-compressor's GPTQ, with its defaults."""
    vocab = json.loads((case.model / "config.json").read_text())["vocab_size"]
    judged = [
        token_windows(str(text), case.model, samples=JUDGED, length=LENGTH, vocab_size=vocab, seed=0, part="held_out")
        for text in (case.own, case.other)
    ]

    def run(format_: str, group: int, seed: int) -> tuple[Peer, Peer]:
        text = token_windows(case.data, case.model, samples=SAMPLES, length=LENGTH, vocab_size=vocab, seed=seed)
        request = {
            "model": str(case.model),
            "format": "nvfp4" if format_ == "nvfp4" else "int4",
            "group": group,
            "calibration": text.windows,
            "judged": [held.windows for held in judged],
        }
        file = directory / "compressor.json"
        file.write_text(json.dumps(request))
        command = (str(PEERS_PYTHON), "-W", "ignore", "-m", "tests.benchmarks.compressor_run", str(file))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        own, other = (Peer(**each) for each in json.loads(done.stdout.splitlines()[-1]))
        return own, other

    for format_, group in COMPRESSED:
        yield _found(format_, group, "llm-compressor, GPTQ", [run(format_, group, seed) for seed in seeds])
