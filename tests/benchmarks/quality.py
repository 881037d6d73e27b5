"""Quality of every format on the demo model's held-out text: ours, and NVIDIA ModelOpt's own simulation of its own.

Perplexity and KL divergence on the same windows; ModelOpt quantises the same model with the same token ids and runs its
fake-quantised modules in `transformers`.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.divergence import Peer, compared
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.assets import asset_directory
from trtforge.core.progress import for_this_terminal
from trtforge.core.recipe import GateConfig, QuantFormat, RoundingMethod, load_recipe
from trtforge.formats.corpus import token_windows
from trtforge.models.formats import FORMATS, measured
from trtforge.pipeline.build import Build
from trtforge.pipeline.stages import selected
from trtforge.verify.stage import verify

SAMPLES, LENGTH, GROUP = 64, 512, 64
BUILDS = {"demo-fp32": "", "demo-fp8": "FP8 KV cache too", "demo-int4awq": "groups of 128"}
"""Demo recipes, and what of their quantisation their name does not say."""


@dataclass(frozen=True)
class Quality:
    """Relative increase of perplexity over float32 and mean KL divergence from it, in nats.

    `rounding` None where the format has one only; `peer` None where ModelOpt has no such format on a CPU.
    """

    format: str
    rounding: RoundingMethod | None
    increase: float
    kl: float
    top1: float
    peer: Peer | None


def measure(directory: Path, formats: Collection[QuantFormat] = tuple(FORMATS)) -> list[Quality]:
    """Every format, with each rounding that it has, the default first."""
    model = asset_directory("recipes") / "demo-model"
    gate = GateConfig(samples=SAMPLES, sequence_length=LENGTH, data=str(model / "heldout.txt"))
    peers = _peers(model, gate, formats)
    found = []
    for name in formats:
        methods = FORMATS[name].methods
        for method in methods if name != "none" else ():
            calibration = None
            if measured(name, method):
                settings = {"format": name, "group_size": GROUP, "rounding": method}
                config = CalibrateConfig.model_validate(settings)
                calibration = calibrate(config, model, directory / f"{name}-{method}-calibration").path
            converted = ConvertConfig.model_validate({"quant": name, "group_size": GROUP})
            checkpoint = convert(converted, model, directory / f"{name}-{method}", calibration=calibration).path
            result = verify(checkpoint, model, gate)
            figures = (result.perplexity.increase, result.kl_mean, result.top1_agreement)
            found.append(Quality(name, method if len(methods) > 1 else None, *figures, peers.get(name)))
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


def _peers(model: Path, gate: GateConfig, formats: Collection[QuantFormat]) -> dict[str, Peer]:
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
        found = {}
        for name in presets.keys() & set(formats):
            preset = with_groups(presets[name], GROUP)
            quantized = mtq.quantize(copy.deepcopy(loaded), preset, lambda m: [m(ids) for ids in batches])
            found[name] = compared(quantized, loaded, held)
    return found


def with_groups(preset: dict[str, Any], group: int) -> dict[str, Any]:
    """ModelOpt's preset with another group size than 128."""
    changed = copy.deepcopy(preset)
    for entry in changed["quant_cfg"]:
        configs = entry.get("cfg") or []
        for config in configs if isinstance(configs, list) else [configs]:
            if (config.get("block_sizes") or {}).get(-1) == 128:
                config["block_sizes"][-1] = group
    return changed
