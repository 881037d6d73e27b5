"""Quality of every format on the demo model's held-out text: ours, and NVIDIA ModelOpt's own simulation of its own.

Perplexity of the same windows; ModelOpt quantises the same model with the same token ids and runs its fake-quantised
modules in `transformers`.
"""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.assets import asset_directory
from trtforge.core.progress import for_this_terminal
from trtforge.core.recipe import GateConfig, load_recipe
from trtforge.formats.corpus import token_windows
from trtforge.models.formats import FORMATS
from trtforge.pipeline.build import Build
from trtforge.pipeline.stages import selected
from trtforge.verify.stage import verify

SAMPLES, LENGTH, GROUP = 64, 512, 64
BUILDS = {"demo-fp32": "", "demo-fp8": "FP8 KV cache too", "demo-int4awq": "groups of 128"}
"""Demo recipes, and what of their quantisation their name does not say."""


@dataclass(frozen=True)
class Quality:
    """Relative increase of perplexity over float32; `peer` None where ModelOpt has no such format on a CPU."""

    format: str
    increase: float
    top1: float
    peer: float | None


def measure(directory: Path) -> list[Quality]:
    """Every format of the registry."""
    model = asset_directory("recipes") / "demo-model"
    gate = GateConfig(samples=SAMPLES, sequence_length=LENGTH, data=str(model / "heldout.txt"))
    peers = _peers(model, gate)
    found = []
    for name, wanted in FORMATS.items():
        if name == "none":
            continue
        calibration = None
        if wanted.calibrated:
            config = CalibrateConfig.model_validate({"format": name, "group_size": GROUP})
            calibration = calibrate(config, model, directory / f"{name}-calibration").path
        converted = ConvertConfig.model_validate({"quant": name, "group_size": GROUP})
        checkpoint = convert(converted, model, directory / name, calibration=calibration).path
        result = verify(checkpoint, model, gate)
        found.append(Quality(name, result.perplexity.increase, result.top1_agreement, peers.get(name)))
    return found


@dataclass(frozen=True)
class BuildQuality:
    """What the report of a build says; `compression` of the quantised linears, None where there are none."""

    recipe: str
    note: str
    perplexity: float
    reference: float
    tokens: int
    compression: float | None


def measure_builds(directory: Path) -> list[BuildQuality]:
    """The demo recipes of `BUILDS`, to their verification."""
    found = []
    for name, note in BUILDS.items():
        recipe = load_recipe(asset_directory("recipes") / f"{name}.yaml")
        build = Build(recipe, directory / f"{name}-build", for_this_terminal())
        report = build.run(selected(recipe, "calibrate", "verify"), started=lambda stage: None)
        assert report.verification is not None, "a build to `verify` verifies"
        perplexity = report.verification.perplexity
        compression = None if recipe.quantization.format == "none" else report.compression
        figures = (perplexity.candidate, perplexity.reference, report.verification.tokens, compression)
        found.append(BuildQuality(name, note, *figures))
    return found


def _peers(model: Path, gate: GateConfig) -> dict[str, float]:
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM

    presets = {
        "fp8": mtq.FP8_DEFAULT_CFG,
        "int4_awq": mtq.INT4_AWQ_CFG,
        "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG,
        "int8_sq": mtq.INT8_SMOOTHQUANT_CFG,
    }
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    vocab = loaded.config.vocab_size
    data = CalibrateConfig.model_validate({"format": "fp8"}).data
    text = token_windows(
        data.data, model, samples=data.samples, length=data.sequence_length, vocab_size=vocab, seed=data.seed
    )
    batches = torch.tensor(text.windows).split(data.batch_size)
    held = token_windows(
        gate.data, model, samples=SAMPLES, length=LENGTH, vocab_size=vocab, seed=0, part="held_out"
    ).windows
    with torch.no_grad():
        reference = _perplexity(loaded, held)
        found = {}
        for name, preset in presets.items():
            quantized = mtq.quantize(copy.deepcopy(loaded), _grouped(preset), lambda m: [m(ids) for ids in batches])
            found[name] = _perplexity(quantized, held) / reference - 1
    return found


def _grouped(preset: dict[str, Any]) -> dict[str, Any]:
    """The demo model's sizes need groups of 64."""
    changed = copy.deepcopy(preset)
    for entry in changed["quant_cfg"]:
        configs = entry.get("cfg") or []
        for config in configs if isinstance(configs, list) else [configs]:
            if (config.get("block_sizes") or {}).get(-1) == 128:
                config["block_sizes"][-1] = GROUP
    return changed


def _perplexity(model: torch.nn.Module, windows: tuple[tuple[int, ...], ...]) -> float:
    total = count = 0.0
    for window in windows:
        ids = torch.tensor(window)
        logits = model(ids.unsqueeze(0)).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)
