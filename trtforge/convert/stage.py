"""The convert stage: checks everything from metadata, then streams the rank files."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from pydantic import Field

from trtforge import __version__
from trtforge.convert.carried import carried_bytes, carried_tensors, write_carried
from trtforge.convert.drafting import Drafters, add_drafting
from trtforge.core import defaults
from trtforge.core.artifact import Produced, produce, require_space
from trtforge.core.config_model import Config
from trtforge.core.digest import file_digest
from trtforge.core.dtypes import dtype_named, model_dtype
from trtforge.core.errors import ForgeError
from trtforge.core.features import Drafting
from trtforge.core.manifest import FileRecord, Identity
from trtforge.core.parallel import Parallel
from trtforge.core.partial import Finished
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import DtypeChoice, KvCacheFormat, QuantFormat
from trtforge.core.watch import Watch
from trtforge.formats.calibration import IN_CHECKPOINTS, Calibration, open_calibration, settings_of
from trtforge.formats.hf import (
    SOURCE_DIRECTORY,
    TOKENIZER_DIRECTORY,
    HfCheckpoint,
    HfConfig,
    copy_tokenizer_file,
    open_checkpoint,
    tokenizer_files,
    tokenizer_name,
)
from trtforge.formats.quantization_config import quantization_files, read_quantized_source
from trtforge.formats.quantized_source import QuantizedSource
from trtforge.formats.shards import StoredTensor
from trtforge.formats.special_tokens import GENERATION_CONFIG, generation_config
from trtforge.formats.tokenizer import require_tokenizer, warn_of_links
from trtforge.formats.trtllm import CONFIG_FILE, LAYERS_FILE, CheckpointConfig
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import CheckpointPlan, Layout, checkpoint_plan
from trtforge.models.content import WeightOnly
from trtforge.models.formats import FORMATS
from trtforge.models.registry import family_of_checkpoint
from trtforge.models.weight_only import holds_part, row_parts
from trtforge.plan.accounting import check_sources
from trtforge.plan.legality import require_legal
from trtforge.plan.network_rules import unbuildable
from trtforge.plan.ties import require_equal_heads

_LOG = logging.getLogger(__name__)


class ConvertConfig(Config):
    """Parallel layout, dtype and quantisation of the checkpoint."""

    tp: int = Field(1, ge=1, description="Tensor parallelism.")
    pp: int = Field(1, ge=1, description="Pipeline parallelism.")
    ep: int = Field(1, ge=1, description="Expert parallelism: groups of whole experts.")
    cp: int = Field(1, ge=1, description="Context parallelism: processes that share rank files.")
    dtype: DtypeChoice = Field("auto", description="auto keeps float16 and bfloat16; float32 becomes float16.")
    quant: QuantFormat = Field("none", description="Format of the decoder's linear layers.")
    kv_cache: KvCacheFormat = Field("none", description="Format of the KV cache.")
    group_size: int = Field(defaults.GROUP_SIZE, description="INT4-AWQ group size; a calibration's takes precedence.")
    exclude_modules: tuple[str, ...] = Field((), description="Patterns of linear layers to leave unquantised.")
    budget: float | None = Field(None, description="Of mixed precision: mean bits of a weight; `formats` keeps to it.")
    formats: tuple[tuple[str, QuantFormat], ...] = Field(
        (), description="Of mixed precision: linear layers by full name whose format is not `quant`."
    )
    parallel_embedding: bool = Field(False, description="Shard the embedding table too.")
    embedding_sharding_dim: int = Field(0, ge=0, le=1, description="0 shards the vocabulary, 1 the hidden size.")
    shared_pre_quant_scale: bool = Field(False, description="AWQ: one scale for all linears that read one input.")
    allow_nonfinite: bool = Field(
        False, description="Convert NaN and infinite weights with a warning; calibrate and verify refuse them."
    )


def convert(
    config: ConvertConfig,
    source: Path,
    out: Path,
    *,
    calibration: Path | None = None,
    drafting: Drafting | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Produced:
    """Write the TensorRT-LLM checkpoint of `source` to `out`, or reuse a matching one there.

    `drafting`: Medusa heads or an EAGLE network to include.

    Raises ForgeError, before anything is written, for an unknown architecture, an illegal layout, a tensor that is
    missing, unexpected or of another shape, an LM head that differs from the embedding it is tied to, a calibration for
    another format, a damaged tokenizer, an end id beyond the vocabulary, and too little disk space. Raises ForgeError
    while reading weights for NaN or infinity. As each byte is read only once (a stored tied head twice), a source that
    changed and a calibration of other weights are found at the end; nothing is published then.
    """
    watch = Watch(source)
    conversion = plan_conversion(config, source, calibration, drafting)
    checkpoint, calibrated, tokenizer = conversion.checkpoint, conversion.calibration, tokenizer_files(source)
    identity = _identity(config, conversion, source, tokenizer)
    if calibrated is not None:
        _require_same_model(calibrated, checkpoint, {CONFIG_FILE: identity.inputs[CONFIG_FILE]})

    def write(directory: Path) -> Mapping[str, FileRecord]:
        from trtforge.convert.writer import pipeline_stages, write_checkpoint

        require_tokenizer(source, conversion.description.vocab_size)
        warn_of_links(tokenizer)
        require_equal_heads(checkpoint, conversion.plan.ties)
        stages = pipeline_stages(conversion.plan, conversion.layout)
        needed = sum(stage.bytes for stage in stages) + carried_bytes(conversion.carried)
        require_space(directory, needed - Finished.read(directory).bytes)
        (directory / CONFIG_FILE).write_text(conversion.description.to_json())
        layers = conversion.description.layers_json()
        if layers is not None:
            (directory / LAYERS_FILE).write_text(layers)
        (directory / SOURCE_DIRECTORY).mkdir()
        shutil.copyfile(checkpoint.config.path, directory / SOURCE_DIRECTORY / CONFIG_FILE)
        _write_tokenizer(directory / TOKENIZER_DIRECTORY, tokenizer, checkpoint.config)
        dtype = dtype_named(conversion.layout.dtype)
        told = progress or Silent()
        copies = write_carried(conversion.carried, checkpoint, directory, told)
        return copies | write_checkpoint(
            stages,
            checkpoint,
            dtype,
            calibrated,
            directory,
            told,
            allow_nonfinite=config.allow_nonfinite,
        )

    def weights() -> Mapping[str, str]:
        digests = checkpoint.digests
        drafters = {} if conversion.drafters is None else conversion.drafters.digests()
        used = [checkpoint.config.path, *quantization_files(source), *checkpoint.weight_files, *tokenizer]
        watch.require_unchanged(used)
        if calibrated is not None:
            _require_same_model(calibrated, checkpoint, digests)
        return digests | drafters

    return produce(out, identity, write, force=force, late_inputs=weights)


def _write_tokenizer(directory: Path, files: Sequence[Path], config: HfConfig) -> None:
    """Copy a model's files; a generation_config.json that is missing or has no end id gets the one of config.json."""
    directory.mkdir()
    for path in files:
        copy_tokenizer_file(path, directory)
    generation = generation_config(config.values, directory)
    if generation is not None:
        (directory / GENERATION_CONFIG).write_text(generation)


def _identity(config: ConvertConfig, conversion: "Conversion", source: Path, tokenizer: Sequence[Path]) -> Identity:
    """Everything that determines the checkpoint and is known before its weights are read."""
    calibrated = conversion.calibration
    rounding = {"rounding": "compensated"} if conversion.layout.compensated else {}
    settings = settings_of(calibrated.manifest) if calibrated else {}
    return Identity(
        stage="checkpoint",
        config=config.model_dump(mode="json", exclude={"formats", "budget"} if config.budget is None else set())
        | {name: getattr(conversion.layout, name) for name in ("group_size", "dtype", "quant", "kv_cache")}
        | rounding
        | (conversion.drafters.settings if conversion.drafters is not None else {})
        | ({"calibration": {key: settings.get(key) for key in IN_CHECKPOINTS}} if calibrated else {}),
        inputs={CONFIG_FILE: file_digest(conversion.checkpoint.config.path)}
        | {path.name: file_digest(path) for path in quantization_files(source)}
        | {f"{TOKENIZER_DIRECTORY}/{tokenizer_name(path)}": file_digest(path) for path in tokenizer}
        | ({"calibration": calibrated.manifest.digest} if calibrated else {}),
        versions={"trtforge": __version__},
    )


@dataclass(frozen=True)
class Conversion:
    """All results of planning, before weights are converted."""

    checkpoint: HfCheckpoint
    calibration: Calibration | None
    layout: Layout
    plan: CheckpointPlan
    description: CheckpointConfig
    carried: tuple[StoredTensor, ...] = ()
    drafters: Drafters | None = None


def plan_conversion(
    config: ConvertConfig, source: Path, calibration: Path | None = None, drafting: Drafting | None = None
) -> Conversion:
    """Plan and check a conversion from config.json, headers and small tensors. Raises ForgeError as `convert` does."""
    checkpoint = open_checkpoint(source)
    layout = layout_for(config, checkpoint.config)
    family = family_of_checkpoint(checkpoint)
    facts = family.facts(checkpoint.config)
    calibrated = _calibration(calibration, config, checkpoint, layout)
    if calibrated is not None:
        compensated = calibrated.quant == config.quant == "int4_wo"
        layout = replace(layout, group_size=calibrated.group_size, compensated=compensated)
    require_legal(family, facts, layout)
    plan = checkpoint_plan(family, facts, layout)
    check_sources(checkpoint, family, facts, plan)
    _require_parts(plan)
    if layout.source:
        from trtforge.convert.repacking import check_values

        check_values(plan.stored, checkpoint.tensors)
    description = checkpoint_config(family, facts, checkpoint.config.architecture, layout)
    carried, drafters = carried_tensors(checkpoint, family, facts), None
    if drafting is not None:
        found = add_drafting(drafting, checkpoint, facts, layout, plan, description)
        drafters, checkpoint, plan, description = found.drafters, found.checkpoint, found.plan, found.description
    _warn_without_engine(description)
    return Conversion(checkpoint, calibrated, layout, plan, description, carried, drafters)


def _warn_without_engine(description: CheckpointConfig) -> None:
    """Warn if no TensorRT-LLM release builds an engine of the checkpoint. It is written for other backends."""
    problem = unbuildable(description)
    if problem is not None:
        _LOG.warning(f"no TensorRT-LLM release builds an engine of this checkpoint: {problem.text}")


def layout_of(config: ConvertConfig, source_dtype: str) -> Layout:
    """The layout by `config`; `source_dtype`: the dtype in the model's config.json."""
    return Layout(
        parallel=Parallel(config.tp, config.pp, config.ep, config.cp),
        dtype=model_dtype(config.dtype, source_dtype),
        quant=config.quant,
        kv_cache=config.kv_cache,
        group_size=config.group_size,
        parallel_embedding=config.parallel_embedding,
        embedding_sharding_dim=config.embedding_sharding_dim,
        exclude_modules=config.exclude_modules,
        formats=config.formats,
        shared_pre_quant_scale=config.shared_pre_quant_scale,
    )


def layout_for(config: ConvertConfig, source: HfConfig) -> Layout:
    """The layout by `config`, with the quantisation of an already quantised source.

    Raises ForgeError for an unsupported quantisation of the source, and for a `quant` or `kv_cache` that differs from
    it.
    """
    layout, stored = layout_of(config, source.dtype), read_quantized_source(source)
    if config.exclude_modules and config.quant == "none" and stored is None:
        raise ForgeError(
            "exclude_modules without a format: nothing is quantised", hint="Give --quant, or leave exclude_modules out."
        )
    if stored is None:
        return layout
    if config.quant not in ("none", stored.format):
        raise ForgeError(
            f"{source.path.parent} is already quantised: {stored.tool} made it {stored.described}, not {config.quant}",
            hint=f"Leave --quant out to keep {stored.described}, or convert the original checkpoint.",
        )
    if config.exclude_modules:
        raise ForgeError(
            f"{source.path.parent} is already quantised ({stored.tool}): exclude_modules cannot undo that",
            hint="Leave it out, or convert the original checkpoint.",
        )
    if config.budget is not None:
        raise ForgeError(
            f"{source.path.parent} {stored.budget_problem}",
            hint="Leave quantization.budget out, or convert the original checkpoint.",
        )
    kv_cache = _kv_cache_for(config, source, stored)
    return replace(layout, quant=stored.format, kv_cache=kv_cache, group_size=stored.group_size, source=stored)


def _kv_cache_for(config: ConvertConfig, source: HfConfig, stored: QuantizedSource) -> KvCacheFormat:
    """The KV cache of an already quantised source. Raises ForgeError for one that it cannot have."""
    problem = stored.kv_cache_problem(config.kv_cache)
    if problem is not None:
        hint = "Leave --kv-cache out" if stored.fp8_kv_cache else "Give --kv-cache fp8, leave it out"
        raise ForgeError(f"{source.path.parent} {problem}", hint=f"{hint}, or convert the original checkpoint.")
    return "fp8" if stored.fp8_kv_cache else config.kv_cache


def _calibration(
    directory: Path | None, config: ConvertConfig, checkpoint: HfCheckpoint, layout: Layout
) -> Calibration | None:
    """The calibration, if the format needs one. Raises ForgeError if it is missing, unused or for another format."""
    if layout.source:
        if directory is not None:
            raise ForgeError(
                f"{checkpoint.directory} is already quantised ({layout.source.tool}): "
                "--calibration applies only to unquantised checkpoints",
                hint="Leave --calibration out, or convert the original checkpoint.",
            )
        return None
    calibrated, scaled_cache = FORMATS[config.quant].calibrated, config.kv_cache == "int8"
    command = (
        f"`trtforge calibrate {quote(str(checkpoint.directory))} CALIBRATION"
        f" --quant {config.quant if calibrated else 'none'}"
        f"{'' if config.kv_cache == 'none' else f' --kv-cache {config.kv_cache}'}`"
    )
    if directory is None:
        if calibrated or scaled_cache:
            raise ForgeError(
                f"{f'--quant {config.quant}' if calibrated else '--kv-cache int8'} needs a calibration",
                hint=f"Run {command} and give --calibration CALIBRATION.",
            )
        return None
    calibration = open_calibration(directory)
    if calibrated and calibration.quant != config.quant:
        raise ForgeError(
            f"{directory} was calibrated for {calibration.quant}, not {config.quant}",
            hint=f"Give --quant {calibration.quant}, or calibrate for {config.quant}.",
        )
    if scaled_cache and not calibration.has_kv_cache:
        raise ForgeError(
            f"{directory} has no scales for an int8 KV cache", hint=f"Run {command} and give --calibration CALIBRATION."
        )
    rounded = calibration.quant == config.quant and "compensated" in FORMATS[config.quant].methods
    if not calibrated and not rounded and (config.kv_cache == "none" or not calibration.has_kv_cache):
        raise ForgeError(
            f"{directory} is not needed with --quant {config.quant} and --kv-cache {config.kv_cache}",
            hint=f"Give --quant {calibration.quant}, or leave --calibration out."
            if calibration.quant != "none"
            else "Give a --kv-cache, or leave --calibration out.",
        )
    return calibration


def _require_parts(plan: CheckpointPlan) -> None:
    """Raises ForgeError if a rank gets too few columns of a weight for its build to find the calibration's codes.

    Applies to weight-only formats, which the build rounds, with a scale for the columns of a rank.
    """
    for target in plan.targets:
        for piece in target.content.pieces if isinstance(target.content, WeightOnly) else ():
            inputs = piece.shape[0 if piece.transposed else 1]
            for cut in piece.cuts:
                if cut.rows and len(cut.cols) < inputs and not holds_part(cut.cols, inputs):
                    raise ForgeError(
                        f"{piece.source}: {len(cut.cols)} of {inputs} inputs on a rank are too few for the codes of "
                        f"the calibration, which are for {row_parts(inputs)} ranks at most",
                        hint="Use fewer ranks, or leave --calibration out (quantization.rounding: nearest).",
                    )


def _require_same_model(calibration: Calibration, checkpoint: HfCheckpoint, digests: Mapping[str, str]) -> None:
    """Raises ForgeError if the calibration was made from other files."""
    made_from = calibration.manifest.identity.inputs
    for name, digest in digests.items():
        if made_from.get(name) != digest:
            raise ForgeError(
                f"the calibration is of another model: {name} differs", hint=f"Calibrate {checkpoint.directory} itself."
            )
