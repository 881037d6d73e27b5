"""The convert stage: checks everything from metadata, then streams the rank files."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from trtforge import __version__
from trtforge.core.artifact import Produced, produce
from trtforge.core.config import Config
from trtforge.core.digest import file_digest
from trtforge.core.dtypes import model_dtype
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FileRecord, Identity
from trtforge.core.parallel import Parallel
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import DtypeChoice, KvCacheFormat, QuantFormat
from trtforge.formats.calibration import Calibration, open_calibration
from trtforge.formats.hf import TOKENIZER_DIRECTORY, HfCheckpoint, open_checkpoint, tokenizer_files
from trtforge.formats.trtllm import CONFIG_FILE
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.plan import Layout, checkpoint_plan
from trtforge.models.registry import family_of_checkpoint
from trtforge.plan.accounting import check_sources
from trtforge.plan.legality import require_legal


class ConvertConfig(Config):
    """How the checkpoint is split and typed."""

    tp: int = Field(1, ge=1, description="Tensor parallelism.")
    pp: int = Field(1, ge=1, description="Pipeline parallelism.")
    ep: int = Field(1, ge=1, description="Expert parallelism: groups of whole experts.")
    cp: int = Field(1, ge=1, description="Context parallelism: processes that read the same rank files.")
    dtype: DtypeChoice = Field("auto", description="auto keeps float16 and bfloat16; float32 becomes float16.")
    quant: QuantFormat = Field("none", description="Format of the decoder's linear layers.")
    kv_cache: KvCacheFormat = Field("none", description="Format of the KV cache.")
    group_size: int = Field(128, description="INT4-AWQ group; the calibration's.")
    parallel_embedding: bool = Field(False, description="Shard the embedding table too.")
    embedding_sharding_dim: int = Field(0, ge=0, le=1, description="0 shards the vocabulary, 1 the hidden size.")


def convert(
    config: ConvertConfig,
    source: Path,
    out: Path,
    *,
    calibration: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Produced:
    """Write the TensorRT-LLM checkpoint of `source` to `out`, or find it there.

    Raises ForgeError, before anything is written, for an unknown architecture, an illegal layout, a tensor that is
    missing, unexpected or of another shape, and a calibration of another model or format.
    """
    checkpoint = open_checkpoint(source)
    family = family_of_checkpoint(checkpoint)
    facts = family.facts(checkpoint.config)
    calibrated = _calibration(calibration, config, checkpoint)
    layout = layout_of(config, checkpoint.config.dtype)
    if calibrated is not None:
        layout = replace(layout, group_size=calibrated.group_size)
    require_legal(family, facts, layout)
    plan = checkpoint_plan(family, facts, layout)
    check_sources(checkpoint, family, plan)
    if calibrated is not None:
        _require_same_model(calibrated, checkpoint)
    description = checkpoint_config(family, facts, checkpoint.config.architecture, layout)
    tokenizer = tokenizer_files(source)
    identity = Identity(
        stage="checkpoint",
        config=config.model_dump(mode="json") | {"group_size": layout.group_size, "dtype": layout.dtype},
        inputs=checkpoint.digests
        | {f"{TOKENIZER_DIRECTORY}/{path.name}": file_digest(path) for path in tokenizer}
        | ({"calibration": calibrated.manifest.digest} if calibrated else {}),
        versions={"trtforge": __version__},
    )

    def write(directory: Path) -> Mapping[str, FileRecord]:
        from trtforge.convert.writer import write_checkpoint

        (directory / CONFIG_FILE).write_text(description.to_json())
        (directory / TOKENIZER_DIRECTORY).mkdir()
        for path in tokenizer:
            shutil.copyfile(path, directory / TOKENIZER_DIRECTORY / path.name)
        return write_checkpoint(plan, layout, checkpoint.tensors, calibrated, directory, progress or Silent())

    return produce(out, identity, write, force=force)


def layout_of(config: ConvertConfig, source_dtype: str) -> Layout:
    """The layout that a configuration asks for, of a model whose config.json states `source_dtype`."""
    return Layout(
        parallel=Parallel(config.tp, config.pp, config.ep, config.cp),
        dtype=model_dtype(config.dtype, source_dtype),
        quant=config.quant,
        kv_cache=config.kv_cache,
        group_size=config.group_size,
        parallel_embedding=config.parallel_embedding,
        embedding_sharding_dim=config.embedding_sharding_dim,
    )


def _calibration(directory: Path | None, config: ConvertConfig, checkpoint: HfCheckpoint) -> Calibration | None:
    """The calibration, if the format needs one. Raises ForgeError if it is absent or of another format."""
    if directory is None:
        if config.quant != "none":
            raise ForgeError(
                f"--quant {config.quant} needs a calibration",
                hint=f"Run `trtforge calibrate {checkpoint.directory} CALIBRATION --quant {config.quant}` "
                "and give --calibration CALIBRATION.",
            )
        return None
    calibration = open_calibration(directory)
    if calibration.quant != config.quant:
        raise ForgeError(
            f"{directory} was calibrated for {calibration.quant}, not {config.quant}",
            hint=f"Give --quant {calibration.quant}, or calibrate for {config.quant}.",
        )
    return calibration


def _require_same_model(calibration: Calibration, checkpoint: HfCheckpoint) -> None:
    """Raises ForgeError if the calibration is of another model: every byte of this one was read to know."""
    made_from = calibration.manifest.identity.inputs
    for name, digest in checkpoint.digests.items():
        if made_from.get(name) != digest:
            raise ForgeError(
                f"the calibration is of another model: {name} differs", hint=f"Calibrate {checkpoint.directory} itself."
            )
