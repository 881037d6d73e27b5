"""The calibrate stage: one pass over the data, layer by layer, that keeps a few statistics of each linear."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from trtforge import __version__
from trtforge.calibrate.precision import forward_dtype, search_dtype
from trtforge.core import defaults
from trtforge.core.artifact import Produced, produce
from trtforge.core.cache import cache_for
from trtforge.core.cache_entry import About
from trtforge.core.config_model import Config
from trtforge.core.device import UsableDevice, usable_device
from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.manifest import FileRecord, Identity
from trtforge.core.parallel import Parallel
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import (
    CalibratedFormat,
    CalibrationConfig,
    Device,
    GroupSize,
    KvCacheFormat,
    KvScalingChoice,
    RoundingChoice,
    RoundingMethod,
)
from trtforge.core.sizes import Bytes
from trtforge.formats.calibration import FILE
from trtforge.formats.corpus import TokenWindows
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.quantization_config import require_unquantized
from trtforge.formats.samples import SampleFacts, Samples
from trtforge.models.checkpoint_plan import Layout, checkpoint_plan
from trtforge.models.formats import FORMATS, kv_scaling, measured, rounding_method
from trtforge.models.registry import family_of_checkpoint
from trtforge.plan.accounting import check_sources
from trtforge.plan.legality import require_legal
from trtforge.plan.ties import require_equal_heads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trtforge.calibrate.layer import Needs

TOKENS_AT_ONCE = 1024  # enough for efficient matrix products
METHOD = 2
"""Version of the method; raised if the same model and data give different tensors, so that earlier calibrations are not
reused."""


class CalibrateConfig(Config):
    """Formats, data and limits of a calibration."""

    format: CalibratedFormat = Field(description="Format of the decoder's linear layers; none: KV cache only.")
    kv_cache: KvCacheFormat = Field("none", description="Format of the KV cache.")
    kv_scales: KvScalingChoice = Field("auto", description="Scales of the KV cache; auto: searched for int8.")
    group_size: GroupSize = Field(defaults.GROUP_SIZE, description="INT4-AWQ: weights that share a scale.")
    data: CalibrationConfig = CalibrationConfig()
    awq_clip: bool = Field(False, description="AWQ: also search the clip threshold of each block of a weight.")
    rounding: RoundingChoice = Field("auto", description="Rounding of 4-bit weights; auto: compensated.")
    memory: Bytes | None = Field(None, description="Memory to stay under, such as 16GB; hidden states go to disk.")
    device: Device = Field("auto", description="Where the model runs; auto takes a GPU where there is one.")


def calibrate(
    config: CalibrateConfig, source: Path, out: Path, *, force: bool = False, progress: Progress | None = None
) -> Produced:
    """Calibrate the checkpoint at `source` into `out`, or reuse a matching calibration there.

    Raises ForgeError, before the model runs, for an unknown architecture, tensors that do not match config.json, an LM
    head that differs from the embedding it is tied to, a group size that fits no layout, and data that is missing,
    empty or of another vocabulary. Raises UsageError for a rounding that the format lacks or that needs no calibration.
    """
    require_measured(config)
    checkpoint = open_checkpoint(source)
    require_unquantized(checkpoint.config)
    family = family_of_checkpoint(checkpoint)
    facts = family.facts(checkpoint.config)
    layout = Layout(Parallel(), "bfloat16", config.format, config.kv_cache, config.group_size)
    require_legal(family, facts, replace(layout, compensated=True))
    plan = checkpoint_plan(family, facts, layout)
    check_sources(checkpoint, family, facts, plan)
    data = config.data
    samples = Samples(data.data, source, data.samples, data.sequence_length, facts.sizes.vocab, data.seed)
    _require_positions(samples.facts, facts.sizes.max_positions)
    device = usable_device(config.device)
    needs = needs_of(config)
    dtype = forward_dtype(checkpoint.config.dtype, device, means_only=needs.means_only)
    identity = _identity(config, checkpoint.digests, samples.facts, device, dtype)

    def write(directory: Path) -> Mapping[str, FileRecord]:
        import torch

        from trtforge.calibrate.memory import hidden_budget
        from trtforge.calibrate.walk import Walk
        from trtforge.models.torch_tensors import write_tensors
        from trtforge.models.transforms import TORCH

        require_equal_heads(checkpoint, plan.ties)
        walk = Walk(checkpoint, family, facts, needs, torch.device(device), TORCH[dtype], directory)
        budget = hidden_budget(config.memory, family, facts, dtype, needs, config.format) if config.memory else None
        batches = list(_batches(samples.windows, data.batch_size))
        with (
            torch.inference_mode(),
            (progress or Silent()).bar(f"Calibrating {config.format}", facts.sizes.num_layers, "layers") as bar,
        ):
            tensors = walk.run(batches, budget, bar)
        _require_finite(tensors, dtype)
        write_tensors(directory / FILE, tensors)
        return {}

    about = About(
        architecture=checkpoint.config.architecture,
        layers=facts.sizes.num_layers,
        hidden=facts.sizes.hidden,
        format=config.format,
        kv_cache=config.kv_cache if config.kv_cache != "none" else None,
    )
    return produce(out, identity, write, force=force, cache=cache_for(about))


def rounding_here(config: CalibrateConfig) -> RoundingMethod:
    """How the calibration rounds weights; the default is that for formats with data."""
    return rounding_method(config.format, config.rounding, data=True)


def require_measured(config: CalibrateConfig) -> None:
    """Raises UsageError for a rounding that the format lacks, or that needs no measurements."""
    if config.format != "none" and not measured(config.format, rounding_here(config)):
        raise UsageError(
            f"--rounding {config.rounding} of {config.format} needs no calibration",
            hint="Leave --rounding out, or convert without a calibration.",
        )


def _require_positions(samples: SampleFacts, positions: int) -> None:
    if samples.longest > positions:
        raise ForgeError(
            f"calibration samples have {samples.longest:,} tokens, the model has {positions:,} positions",
            hint=f"Give --seq-len {positions} or less (calibration.sequence_length in a recipe).",
        )


def _require_finite(tensors: "Mapping[str, Tensor]", dtype: ModelDtype) -> None:
    from trtforge.models.torch_tensors import all_finite

    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise ForgeError(
                f"{name} is NaN or infinite: the activations overflow {dtype}",
                hint="Calibrate with --device cpu, which computes in float32."
                if dtype == "float16"
                else "Use an undamaged checkpoint, or other data.",
            )


def needs_of(config: CalibrateConfig) -> "Needs":
    """The measurements that the configured formats need."""
    from trtforge.calibrate.layer import Needs

    wanted = FORMATS[config.format]
    compensated = rounding_here(config) == "compensated"
    return Needs(
        magnitudes=wanted.static_activations,
        kv_cache=config.kv_cache != "none",
        kv_search=config.kv_cache if kv_scaling(config.kv_cache, config.kv_scales) == "searched" else "none",
        awq=wanted.smoothing == "awq",
        clip=wanted.smoothing == "awq" and config.awq_clip,
        compensated=compensated,
        nvfp4=compensated and wanted.rounding == "nvfp4",
        whole_rows=compensated and wanted.rounding is None,
        channels=wanted.smoothing is not None and wanted.static_activations,
        group_size=config.group_size,
    )


def _batches(windows: TokenWindows, size: int) -> "Iterator[torch.Tensor]":
    """(windows, length) int64 batches of `size` equally long windows, or fewer to bound the activations' memory."""
    import torch

    size = max(1, min(size, TOKENS_AT_ONCE // len(windows.windows[0])))
    for start in range(0, len(windows.windows), size):
        yield torch.tensor(windows.windows[start : start + size], dtype=torch.int64)


def _identity(
    config: CalibrateConfig, digests: dict[str, str], samples: SampleFacts, device: UsableDevice, dtype: ModelDtype
) -> Identity:
    """Everything that determines the calibration; all of it must match for a cache hit."""
    return Identity(
        stage="calibration",
        config={
            "method": METHOD,
            "format": config.format,
            "kv_cache": config.kv_cache,
            "group_size": config.group_size,
            "awq_clip": config.awq_clip,
            "rounding": rounding_here(config),
            "device": device,
            "forward_dtype": dtype,
            "search_dtype": search_dtype(device) if needs_of(config).awq or needs_of(config).nvfp4 else None,
            "samples_asked": config.data.samples,
            "sequence_length": config.data.sequence_length,
            "seed": config.data.seed,
            "samples": samples.windows,
            "tokens": samples.tokens,
            "documents": samples.documents,
            "document_lengths": samples.document_lengths,
            "batch_size": config.data.batch_size,
        }
        | ({"kv_scales": "searched"} if needs_of(config).kv_search != "none" else {}),
        inputs=digests | {"data": samples.digest},
        versions={"trtforge": __version__, "torch": version("torch"), "transformers": version("transformers")},
    )
