"""Sources of an llmapi engine's weights: a TensorRT-LLM checkpoint, or a Hugging Face checkpoint as it is."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge import __version__
from trtforge.compile.llmapi import LlmapiPlan
from trtforge.core.artifact import require_space
from trtforge.core.clone import link_or_copy
from trtforge.core.digest import file_digest
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FileRecord, Identity, Manifest, is_foreign
from trtforge.core.partial import Finished
from trtforge.core.progress import Progress
from trtforge.formats.adapter import adapter_files
from trtforge.formats.hf import (
    CONFIG,
    INDEX,
    QUANTIZATION_FILES,
    SOURCE_DIRECTORY,
    TOKENIZER_DIRECTORY,
    HfCheckpoint,
    HfConfig,
    copy_tokenizer_file,
    open_checkpoint,
    read_config,
    resolve_source,
    tokenizer_files,
    tokenizer_name,
)
from trtforge.formats.hf_quant_config import HfQuantization
from trtforge.formats.llmapi import MODEL_FILE
from trtforge.formats.older_config import with_older_names
from trtforge.formats.quantization_values import without_quantization
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import CARRIED_FILE, LAYERS_FILE, CheckpointConfig, rank_file
from trtforge.models.families.multimodal import NESTED
from trtforge.models.hf_export_plan import hf_plan
from trtforge.models.hf_tensors import HfPlan, copied
from trtforge.models.predictor import predictor_modules
from trtforge.models.registry import family_of
from trtforge.plan.llm_api_arguments import DRAFT_DIRECTORY


@dataclass(frozen=True)
class CheckpointSource:
    """A TensorRT-LLM checkpoint, with the plan to write it as a Hugging Face one."""

    directory: Path
    manifest: Manifest
    model: CheckpointConfig
    hf: HfConfig
    tensors: HfPlan

    @classmethod
    def open(cls, directory: Path, manifest: Manifest, model: CheckpointConfig) -> "CheckpointSource":
        """Read the headers and plan the tensors. Raises ForgeError for a checkpoint that cannot be converted back."""
        source = directory / SOURCE_DIRECTORY
        if not (source / CONFIG).is_file():
            raise ForgeError(
                f"{directory} lacks {SOURCE_DIRECTORY}/{CONFIG}, the model's own configuration",
                hint="trtforge did not write it: give the Hugging Face checkpoint that it was made from."
                if is_foreign(manifest)
                else "It was written by an older trtforge: convert the model again with --force.",
            )
        hf = read_config(source)
        family = family_of(hf.architecture)
        stored = [
            {tensor.spec.name: tensor for tensor in read_header(directory / rank_file(rank.index))}
            for rank in model.parallel.ranks
        ]
        tensors = hf_plan(family, family.facts(hf), model, stored)
        if (directory / CARRIED_FILE).is_file():
            carried = read_header(directory / CARRIED_FILE)
            names = (tensor.spec.name for tensor in carried)
            tensors += copied(carried, predictor_modules(family, names, model.num_hidden_layers))
        return cls(directory, manifest, model, hf, tensors)

    @property
    def inputs(self) -> dict[str, str]:
        """Digests by name."""
        return {"checkpoint": self.manifest.digest}

    def write(self, out: Path, progress: Progress) -> Mapping[str, FileRecord]:
        """Write the Hugging Face checkpoint."""
        from trtforge.compile.hf_writer import shards_of, write_tensors

        shards = shards_of(self.tensors.tensors)
        require_space(out, sum(shard.bytes for shard in shards) - Finished.read(out).bytes)
        config = without_quantization(with_older_names(self.hf.values))
        config |= {key: self.model.dtype for key in ("dtype", "torch_dtype") if key in config}
        config.setdefault("torch_dtype", self.model.dtype)
        if isinstance(text := config.get("text_config"), dict):
            changed = {key: self.model.dtype for key in ("dtype", "torch_dtype") if key in text}
            config["text_config"] = text | changed
        if self.model.quantization.quant_algo is not None:
            excluded = _with_names_inside(self.tensors.unquantized)
            quantization = HfQuantization(self.model.quantization, excluded, self.tensors.algorithms)
            layers = quantization.quant_cfg()
            if layers is not None:
                _write_json(out / LAYERS_FILE, layers)
            config["quantization_config"] = quantization.quantization_config()
            _write_json(out / QUANTIZATION_FILES[0], quantization.hf_quant_config())
        _write_json(out / CONFIG, config)
        for path in tokenizer_files(self.directory / TOKENIZER_DIRECTORY):
            copy_tokenizer_file(path, out)
        return write_tensors(shards, self.manifest.digest, out, progress)


@dataclass(frozen=True)
class HuggingFaceSource:
    """A Hugging Face checkpoint that is used as it is.

    Its weights are hard-linked into the artifact if possible; so the artifact is complete, movable and small.
    """

    checkpoint: HfCheckpoint
    files: tuple[Path, ...]

    @classmethod
    def open(cls, directory: Path) -> "HuggingFaceSource":
        """Read the headers. Raises ForgeError for a damaged or incomplete checkpoint, pickled weights, and names that
        TensorRT-LLM does not read."""
        checkpoint = open_checkpoint(directory)
        _require_published_names(checkpoint)
        return cls(checkpoint, tuple(_files_of(checkpoint)))

    @property
    def inputs(self) -> dict[str, str]:
        """Digests by name."""
        weights = self.checkpoint.digests
        return {tokenizer_name(path): weights.get(path.name) or file_digest(path) for path in self.files}

    def write(self, out: Path, progress: Progress) -> Mapping[str, FileRecord]:
        """Link the weights, or copy them if linking fails; copy files that users may edit."""
        with progress.bar("Linking", len(self.files), "files") as bar:
            for path in self.files:
                if path in self.checkpoint.weight_files:
                    link_or_copy(path.resolve(), out / path.name)
                else:
                    copy_tokenizer_file(path, out)
                if path.name == CONFIG:
                    self._add_older_names(out / path.name)
                bar.advance(1)
        return {}

    def _add_older_names(self, path: Path) -> None:
        """Add the older names of config.json's keys, unless it has them or does not need them."""
        values = self.checkpoint.config.values
        if (named := with_older_names(values)) != values:
            _write_json(path, named)


Source = CheckpointSource | HuggingFaceSource


@dataclass(frozen=True)
class Beside:
    """The files in an engine's directory beside the model: a draft model and LoRA adapters, by their directories."""

    draft: HuggingFaceSource | None
    adapters: tuple[Path, ...]

    @classmethod
    def open(cls, plan: LlmapiPlan) -> "Beside":
        """Find the files. Raises ForgeError for a draft model that is not available, and for a damaged checkpoint."""
        draft = None if plan.draft is None else HuggingFaceSource.open(resolve_source(plan.draft))
        return cls(draft, tuple(map(Path, plan.adapters)))

    @property
    def inputs(self) -> dict[str, str]:
        """Digests by name, the draft model's and the adapters' below their directories."""
        draft = {} if self.draft is None else self.draft.inputs
        files = {f"{place}/{path.name}": file_digest(path) for place, path in adapter_files(self.adapters)}
        return {f"{DRAFT_DIRECTORY}/{name}": digest for name, digest in draft.items()} | files

    def write(self, out: Path, progress: Progress) -> None:
        """Write the files below `out`. The task id of an adapter is its position in the recipe, from 1."""
        if self.draft is not None:
            (out / DRAFT_DIRECTORY).mkdir(exist_ok=True)
            self.draft.write(out / DRAFT_DIRECTORY, progress)
        for place, path in adapter_files(self.adapters):
            (out / place).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, out / place / path.name)


def identity_of(plan: LlmapiPlan, source: Source, beside: Beside) -> Identity:
    """What determines the engine's bytes."""
    return Identity(
        stage="engine",
        config=plan.identity() | {"target": plan.target},
        inputs=source.inputs | beside.inputs,
        versions={"trtforge": __version__},
    )


def write_engine(
    plan: LlmapiPlan, source: Source, beside: Beside, out: Path, progress: Progress
) -> Mapping[str, FileRecord]:
    """Write the artifact's files; returns the records of those whose digests are known."""
    beside.write(out, progress)
    (out / MODEL_FILE).write_text(plan.args.to_yaml())
    return source.write(out, progress)


def _with_names_inside(modules: Sequence[str]) -> tuple[str, ...]:
    """The excluded modules; those of a multimodal model's language model also by their names within that model.

    TensorRT-LLM creates the language model as a separate model and passes it the list unchanged (`get_sub_model_config`
    in tensorrt_llm/_torch/models/modeling_gemma3vl.py, 1.3.0rc3; modeling_mistral.py likewise).
    """
    inside = (name.removeprefix(NESTED) for name in modules if name.startswith(NESTED))
    return (*modules, *inside)


def _require_published_names(checkpoint: HfCheckpoint) -> None:
    """Raises ForgeError for names that TensorRT-LLM does not read.

    Source: `filter_weights("language_model", ...)` in tensorrt_llm/_torch/models/modeling_gemma3vl.py.
    """
    if checkpoint.of_modules:
        tensor = checkpoint.of_modules[0]
        raise ForgeError(
            f"{tensor.file}: {tensor.spec.name} is a name of transformers' modules, which TensorRT-LLM does not read",
            hint="Convert the model and compile the checkpoint: `trtforge convert HF_DIR CHECKPOINT`.",
        )


def _files_of(checkpoint: HfCheckpoint) -> Iterator[Path]:
    """The files of the checkpoint, without pickles and code."""
    directory = checkpoint.directory
    names = (CONFIG, *QUANTIZATION_FILES, INDEX)
    yield from (directory / name for name in names if (directory / name).is_file())
    yield from checkpoint.weight_files
    yield from tokenizer_files(directory)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
