"""The llmapi backend: a Hugging Face checkpoint and model.yaml, which TensorRT-LLM's LLM API runs without an engine.

Out of a TensorRT-LLM checkpoint, whose rank files are taken apart; or a Hugging Face directory as it is, for models
that are not converted and for checkpoints that are quantised already.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtforge import __version__
from trtforge.core.artifact import require_space
from trtforge.core.digest import file_digest
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FileRecord, Identity, Manifest
from trtforge.core.parallel import Parallel
from trtforge.core.partial import Finished
from trtforge.core.progress import Progress
from trtforge.core.recipe import EngineConfig
from trtforge.formats.hf import (
    CONFIG,
    INDEX,
    QUANTIZATION_FILES,
    SOURCE_DIRECTORY,
    TOKENIZER_DIRECTORY,
    HfCheckpoint,
    HfConfig,
    open_checkpoint,
    read_config,
    tokenizer_files,
)
from trtforge.formats.hf_quant_config import HfQuantization
from trtforge.formats.llmapi import MODEL_FILE, KvCacheArgs, LlmArgs, require_llm_api
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import CheckpointConfig, rank_file
from trtforge.models.hf_plan import HfPlan, hf_plan, require_format
from trtforge.models.registry import family_of
from trtforge.plan.limits import Limits, Positions, derive_limits

TOKENS_PER_BLOCK = 32
"""KvCacheConfig's default (tensorrt_llm/llmapi/llm_args.py, 1.2)."""
_SCALES_ARE_ONE = (
    "The LLM API runs the FP8 KV cache of an unquantised model with scale 1: the checkpoint's scales are left out."
)


@dataclass(frozen=True)
class LlmapiPlan:
    """What will be written, from metadata alone. `made_from`: what the weights come from."""

    args: LlmArgs
    target: str
    limits: Limits
    made_from: Literal["checkpoint", "hugging_face"]
    warnings: tuple[str, ...] = ()

    def with_args(self, values: Mapping[str, Any]) -> "LlmapiPlan":
        """The same with other arguments, by dotted key."""
        return replace(self, args=self.args.with_values(values, MODEL_FILE))

    def identity(self) -> dict[str, Any]:
        """What decides the engine's bytes, its inputs apart; `longest_prompt` is for whoever packages it."""
        return {
            "backend": "llmapi",
            "made_from": self.made_from,
            "model_yaml": self.args.to_json(),
            "longest_prompt": self.limits.longest_prompt,
        }

    def as_json(self) -> dict[str, Any]:
        """What --dry-run prints."""
        return {
            "backend": "llmapi",
            "tensorrt_llm": self.target,
            "model_yaml": self.args.to_json(),
            "made_from": self.made_from,
            "in_flight_batching": True,
            "longest_prompt": self.limits.longest_prompt,
            "processes": self.args.world_size,
            "warnings": [*self.limits.warnings, *self.warnings],
        }


@dataclass(frozen=True)
class _HfPositions:
    """What limits follow from, of a model that no table describes."""

    max_position_embeddings: int | None
    rotary_scaling: dict[str, Any] | None
    position_embedding_type: str = "unknown"

    @classmethod
    def of(cls, config: HfConfig) -> "_HfPositions":
        values = config.values.get("text_config") or config.values
        text = HfConfig(values, config.path) if isinstance(values, dict) else config
        positions = text.values.get("max_position_embeddings")
        return cls(positions if isinstance(positions, int) else None, text.rope_scaling)


def plan_for_checkpoint(model: CheckpointConfig, config: EngineConfig) -> LlmapiPlan:
    """The plan for a TensorRT-LLM checkpoint of this configuration. Raises ForgeError for a format without a place."""
    require_format(model)
    cache = model.quantization.kv_cache_quant_algo == "FP8"
    warnings = (_SCALES_ARE_ONE,) if cache and model.quantization.quant_algo is None else ()
    plan = _plan(model, model.parallel, config, "checkpoint", fp8_cache=cache)
    return replace(plan, warnings=warnings)


def plan_for_hugging_face(directory: Path, parallel: Parallel, config: EngineConfig) -> LlmapiPlan:
    """The plan for a Hugging Face directory as it is. Raises ForgeError if it is none."""
    return _plan(_HfPositions.of(read_config(directory)), parallel, config, "hugging_face", fp8_cache=False)


def _plan(
    model: Positions,
    parallel: Parallel,
    config: EngineConfig,
    made_from: Literal["checkpoint", "hugging_face"],
    *,
    fp8_cache: bool,
) -> LlmapiPlan:
    limits = derive_limits(model, config, TOKENS_PER_BLOCK)
    args = LlmArgs(
        tensor_parallel_size=parallel.tp,
        pipeline_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp if parallel.cp > 1 else None,
        moe_tensor_parallel_size=parallel.tp // parallel.ep if parallel.ep > 1 else None,
        moe_expert_parallel_size=parallel.ep if parallel.ep > 1 else None,
        max_batch_size=limits.max_batch_size,
        max_input_len=limits.max_input_len,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        max_beam_width=limits.max_beam_width,
        enable_chunked_prefill=config.features.chunked_context,
        kv_cache_config=KvCacheArgs(
            enable_block_reuse=config.features.kv_reuse,
            tokens_per_block=limits.tokens_per_block,
            dtype="fp8" if fp8_cache else "auto",
        ),
    )
    require_llm_api(config.target.tensorrt_llm, args)
    return LlmapiPlan(args, config.target.tensorrt_llm, limits, made_from)


@dataclass(frozen=True)
class CheckpointSource:
    """A TensorRT-LLM checkpoint, ready to be taken apart."""

    directory: Path
    manifest: Manifest
    model: CheckpointConfig
    hf: HfConfig
    tensors: HfPlan

    @classmethod
    def open(cls, directory: Path, manifest: Manifest, model: CheckpointConfig) -> "CheckpointSource":
        """Find out where everything is. Raises ForgeError for what has no way back."""
        source = directory / SOURCE_DIRECTORY
        if not (source / CONFIG).is_file():
            raise ForgeError(
                f"{directory} lacks {SOURCE_DIRECTORY}/{CONFIG}, the model's own configuration",
                hint="An older trtforge wrote it: convert the model again with --force.",
            )
        hf = read_config(source)
        family = family_of(hf.architecture)
        stored = [
            {tensor.spec.name: tensor for tensor in read_header(directory / rank_file(rank.index))}
            for rank in model.parallel.ranks
        ]
        return cls(directory, manifest, model, hf, hf_plan(family, family.facts(hf), model, stored))

    @property
    def inputs(self) -> dict[str, str]:
        """Digests by name."""
        return {"checkpoint": self.manifest.digest}

    def write(self, out: Path, progress: Progress) -> Mapping[str, FileRecord]:
        """Write the Hugging Face checkpoint."""
        from trtforge.compile.hf_writer import shards_of, write_tensors

        shards = shards_of(self.tensors.tensors)
        require_space(out, sum(shard.bytes for shard in shards) - Finished.read(out).bytes)
        config = dict(self.hf.values)
        config.pop("quantization_config", None)
        config["dtype" if "dtype" in config else "torch_dtype"] = self.model.dtype
        if self.model.quantization.quant_algo is not None:
            quantization = HfQuantization(self.model.quantization, self.tensors.unquantized)
            config["quantization_config"] = quantization.quantization_config()
            _write_json(out / QUANTIZATION_FILES[0], quantization.hf_quant_config())
        _write_json(out / CONFIG, config)
        for path in tokenizer_files(self.directory / TOKENIZER_DIRECTORY):
            shutil.copyfile(path, out / path.name)
        return write_tensors(shards, self.manifest.digest, out, progress)


@dataclass(frozen=True)
class HuggingFaceSource:
    """A Hugging Face directory that is taken as it is.

    Its files are linked into the artifact where that is possible: it is whole and can be moved, at no cost in space.
    """

    checkpoint: HfCheckpoint
    files: tuple[Path, ...]

    @classmethod
    def open(cls, directory: Path) -> "HuggingFaceSource":
        """Read the headers. Raises ForgeError for a damaged or incomplete checkpoint, and for pickled weights."""
        checkpoint = open_checkpoint(directory)
        return cls(checkpoint, tuple(_files_of(checkpoint)))

    @property
    def inputs(self) -> dict[str, str]:
        """Digests by name."""
        weights = self.checkpoint.digests
        return {path.name: weights.get(path.name) or file_digest(path) for path in self.files}

    def write(self, out: Path, progress: Progress) -> Mapping[str, FileRecord]:
        """Link, or else copy, every file."""
        with progress.bar("Linking", len(self.files), "files") as bar:
            for path in self.files:
                _link(path.resolve(), out / path.name)
                bar.advance(1)
        return {}


Source = CheckpointSource | HuggingFaceSource


def identity_of(plan: LlmapiPlan, source: Source) -> Identity:
    """What decides the engine's bytes."""
    return Identity(
        stage="engine",
        config=plan.identity() | {"target": plan.target},
        inputs=source.inputs,
        versions={"trtforge": __version__},
    )


def write_engine(plan: LlmapiPlan, source: Source, out: Path, progress: Progress) -> Mapping[str, FileRecord]:
    """The artifact's files; the records of those whose digests are known."""
    (out / MODEL_FILE).write_text(plan.args.to_yaml())
    return source.write(out, progress)


def _files_of(checkpoint: HfCheckpoint) -> Iterator[Path]:
    """What makes up the checkpoint: no pickles and no code."""
    directory = checkpoint.directory
    names = (CONFIG, *QUANTIZATION_FILES, INDEX)
    yield from (directory / name for name in names if (directory / name).is_file())
    yield from checkpoint.weight_files
    yield from tokenizer_files(directory)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_json(path: Path, values: Mapping[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
