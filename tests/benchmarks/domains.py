"""Quality in and out of the calibration's domain: ours with each rounding, and NVIDIA ModelOpt's recipes.

Two models, each calibrated on text like its training's: the demo model (prose of Python's library) and the same,
trained further on C++ headers (second_model.py). Mean KL divergence and perplexity against float32 on held-out text of
both kinds, with several calibration seeds. All calibrate on the same windows. ModelOpt is simulated in `transformers`;
its NVFP4 needs CUDA, but its codes are those of our rounding to the nearest (tests/calibrate/test_modelopt.py).
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.quality import Peer, compared, with_groups
from tests.benchmarks.second_model import HELD_OUT, TRAINING, train, write_texts
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.assets import asset_directory
from trtforge.core.recipe import CalibrationConfig, GateConfig
from trtforge.formats.corpus import token_windows
from trtforge.verify.stage import verify

SEEDS = (0, 1, 2)
SAMPLES, JUDGED, LENGTH = 16, 12, 512
OURS = (
    ("int4_awq", 64, "none"),
    ("int4_awq", 128, "none"),
    ("w4a8_awq", 128, "none"),
    ("nvfp4", 128, "none"),
    ("none", 128, "fp8"),
)
"""Format, group size, format of the KV cache."""
PEERS = (("int4_awq", 64), ("int4_awq", 128), ("w4a8_awq", 128))
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
    write_texts(second)
    prose, headers = demo / "heldout.txt", second / HELD_OUT
    yield Domains("the demo model", demo, CalibrationConfig().data, prose, headers)
    if not (second / "config.json").exists():
        train(second)
    yield Domains("a Llama of C++ headers", second, str(second / TRAINING), headers, prose)


def measure(case: Domains, directory: Path, seeds: Sequence[int] = SEEDS) -> list[Found]:
    """Every way with one model."""
    found = []
    for format_, group, cache in OURS:
        for method in ("compensated", "nearest") if format_ != "none" else ("",):
            each = [_ours(case, directory, format_, group, cache, method, seed) for seed in seeds]
            name = format_ if cache == "none" else f"{cache} KV cache"
            found.append(_found(name, group, f"trtforge, {method}" if method else "trtforge", each))
    found.append(_found("int4_wo", 0, "TensorRT-LLM's build", [_converted(case, directory, "int4_wo", None)]))
    return [*found, *_peers(case, seeds)]


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
    settings: dict[str, Any] = {"format": format_, "group_size": group, "kv_cache": cache, "data": data}
    if method:
        settings["rounding"] = method
    out = directory / f"{case.model.name}-{format_}-{group}-{cache}-{method}-{seed}"
    made = calibrate(CalibrateConfig.model_validate(settings), case.model, out / "calibration").path
    return _converted(case, out, format_, made, group, cache)


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
        yield _found(format_, group, "ModelOpt", [run(preset, seed) for seed in seeds])
        if format_ == "int4_awq":
            full = preset | {"algorithm": _FULL}
            yield _found(format_, group, "ModelOpt, awq_full", [run(full, seed) for seed in seeds])
