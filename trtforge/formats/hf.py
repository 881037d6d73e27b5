"""A Hugging Face checkpoint directory: config.json, safetensors (one file or sharded), tokenizer files."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from trtforge.core.digest import file_digest
from trtforge.core.errors import ForgeError, Repair, first_line
from trtforge.core.json_text import read_json_object
from trtforge.core.nearest import nearest_directory
from trtforge.core.plausible import require_plausible
from trtforge.core.reading import require_linked
from trtforge.formats import mxfp4_experts
from trtforge.formats.block_fp8 import as_bfloat16, fp8_blocks
from trtforge.formats.chat_template import TEMPLATE_FILE, TOOL_TEMPLATE_FILE
from trtforge.formats.published_names import published_name
from trtforge.formats.shards import StoredTensor, read_header
from trtforge.formats.source_digest import SourceDigests, stored_parts
from trtforge.formats.stacked_experts import by_expert, stacked_by_transformers

CONFIG = "config.json"
_LARGEST = sys.float_info.max
_GIVE = "Give a checkpoint directory or a hub id (owner/name)."
ITS_OWN_CONFIG = "Use the config.json that came with the model."
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Quantisation files beside config.json, of ModelOpt, AutoGPTQ and AutoAWQ."""
TOKENIZER_DIRECTORY = "tokenizer"  # inside checkpoints and engines: a stage needs only the previous stage's output
SOURCE_DIRECTORY = "source"  # inside checkpoints: the model's own config.json
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    TEMPLATE_FILE,
    "chat_template.json",
    TOOL_TEMPLATE_FILE,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that turn text and images into inputs: the LLM API loads a vision model's processor also for text."""


@dataclass(frozen=True)
class HfConfig:
    """config.json of transformers 4 (`rope_theta`, `torch_dtype`) or 5 (`rope_parameters`, `dtype`), read alike."""

    values: Mapping[str, Any]
    path: Path

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ForgeError(f"{self.path}: {self.values!r:.60} is not an object", hint=ITS_OWN_CONFIG)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above zero. Raises ForgeError if it is absent without a default, or anything else."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a whole number above zero")
        return value

    def count(self, key: str) -> int:
        """A non-negative integer, 0 if absent. Raises ForgeError for anything else."""
        return 0 if self.values.get(key) in (None, 0) else self.integer(key)

    def items(self, key: str) -> list[Any]:
        """A list, empty if absent. Raises ForgeError for anything else."""
        value = self.values.get(key) or []
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def number(self, key: str, default: float, *, above: float | None = None, least: float | None = None) -> float:
        """A finite number within the bounds. Raises ForgeError for anything else."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise self._wrong(key, value, "a number")
        if (above is not None and value <= above) or (least is not None and value < least):
            raise self._wrong(key, value, f"a number above {above:g}" if above is not None else f"at least {least:g}")
        return float(value)

    def positive_or_none(self, key: str) -> float | None:
        """A finite number above zero, unchanged; None if absent. Raises ForgeError for anything else."""
        value: float | None = self.values.get(key)
        if value is not None:
            self.number(key, value, above=0)
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ForgeError:
        said = "is missing" if value is None else f"is {value!r}, not {wanted}"
        return ForgeError(f"{self.path}: {key} {said}", hint=ITS_OWN_CONFIG)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        return default if value is None else bool(value)

    @property
    def architecture(self) -> str:
        """The model class in `architectures`."""
        names = self.values.get("architectures") or None
        if not isinstance(names, list):
            raise self._wrong("architectures", names, "a list")
        return str(names[0])

    @property
    def dtype(self) -> str:
        """The dtype of the weights in config.json; float32 if absent (`read_config` adds that of the files)."""
        return str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32").removeprefix("torch.")

    @property
    def rope_theta(self) -> float:
        """Base of the rotary embedding."""
        return HfConfig({**self.values, **self._rope}, self.path).number("rope_theta", 10000.0, above=0)

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """The scaling of the rotary embedding as HF writes it, None if there is none."""
        apart = ("rope_theta", "partial_rotary_factor")
        scaling = {key: value for key, value in self._rope.items() if key not in apart}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        return None if kind == "default" else dict(scaling)

    @property
    def fp8_blocks(self) -> tuple[int, int] | None:
        """Rows and columns of the blocks of FP8 with block scales; None for other checkpoints."""
        return fp8_blocks(self.values, str(self.path))

    @property
    def mxfp4_experts(self) -> bool:
        """Whether the experts are stored in MXFP4."""
        return mxfp4_experts.stored_so(self.values)

    def partial_rotary(self, default: float) -> float:
        """The fraction of a head's dimensions that are rotated."""
        return HfConfig({**self.values, **self._rope}, self.path).number("partial_rotary_factor", default, above=0)

    @property
    def _rope(self) -> Mapping[str, Any]:
        """`rope_scaling`, else `rope_parameters`. Its keys take precedence over those beside it, as in transformers
        (modeling_rope_utils.py, `convert_rope_params_to_dict`)."""
        return self._mapping("rope_scaling") or self._mapping("rope_parameters")

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value


@dataclass(frozen=True)
class HfCheckpoint:
    """A checkpoint directory, with its config and safetensors headers; no weights are read.

    FP8 matrices with block scales and experts in MXFP4 are bfloat16 matrices in `tensors`, without their scales;
    experts stacked in one tensor become one matrix each. Names are those of published models; `of_modules`: the tensors
    that are stored under the names of transformers' modules instead.
    """

    directory: Path
    config: HfConfig
    tensors: Mapping[str, StoredTensor]
    weight_files: tuple[Path, ...]
    of_modules: tuple[StoredTensor, ...]

    @cached_property
    def contents(self) -> SourceDigests:
        """The tensors' digests; readers of tensors may pass it the bytes that they read."""
        return SourceDigests(self.tensors)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(part.spec.nbytes for part in stored_parts(self.tensors))

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of each file that determines the converted weights. Weights not hashed yet are read now."""
        weights = {path.name: self.contents.of_file(path) for path in self.weight_files}
        return {self.config.path.name: file_digest(self.config.path), **weights}


def read_config(directory: Path) -> HfConfig:
    """The config.json of a checkpoint directory, with the dtype of its weights. Raises ForgeError if there is none."""
    path = directory / CONFIG
    values = _read_json(path, f"Give a Hugging Face checkpoint directory; {directory} has no config.json.")
    _require_hugging_face(values, directory)
    require_plausible(values, str(path), ITS_OWN_CONFIG)
    config = HfConfig(values, path)
    for key in ("rope_parameters", "rope_scaling"):
        config._mapping(key)
    if values.get("dtype") or values.get("torch_dtype"):
        return config
    stored = _stored_dtype(directory)
    return config if stored is None else HfConfig({**values, "dtype": stored}, path)


def _stored_dtype(directory: Path) -> str | None:
    """The dtype of most weights in the first file; None without such a file. transformers, too, uses the weights' dtype
    if config.json has none (openai/gpt-oss-20b)."""
    index, sizes = directory / INDEX, Counter[str]()
    try:
        names = sorted(set(_weight_map(index).values())) if index.is_file() else [SINGLE]
        for tensor in read_header(_shard(directory, names[0], index)):
            if tensor.spec.dtype.name in ("float32", "float16", "bfloat16"):
                sizes[tensor.spec.dtype.name] += tensor.spec.nbytes
    except (ForgeError, IndexError):  # `open_checkpoint` reports the error
        return None
    return max(sizes, key=sizes.__getitem__, default=None)


def _require_hugging_face(values: Mapping[str, Any], directory: Path) -> None:
    """Raise ForgeError for the config.json of a TensorRT-LLM checkpoint or engine."""
    if "architectures" in values:
        return
    if "pretrained_config" in values:
        raise ForgeError(
            f"{directory} is a TensorRT-LLM engine, not a Hugging Face checkpoint",
            hint=f"Give the model that it was made from, or `trtforge package {quote(str(directory))} REPOSITORY`.",
        )
    if "architecture" in values:
        raise ForgeError(
            f"{directory} is a TensorRT-LLM checkpoint already, not a Hugging Face checkpoint",
            hint=f"Give the model that it was made from, or `trtforge compile {quote(str(directory))} ENGINE`.",
        )


def open_checkpoint(directory: Path) -> HfCheckpoint:
    """Read all headers. Raises ForgeError for a missing, truncated or duplicate file or tensor, or pickled weights."""
    config = read_config(directory)
    index = directory / INDEX
    require_linked(directory / name for name in (SINGLE, INDEX, *QUANTIZATION_FILES, *TOKENIZER_FILES))
    if index.is_file():
        weight_map = _weight_map(index)
        _require_one_model(directory, weight_map)
        files = tuple(_shard(directory, name, index) for name in sorted(set(weight_map.values())))
    elif (directory / SINGLE).is_file():
        weight_map, files = None, (directory / SINGLE,)
    else:
        raise _no_weights(directory)
    architecture = config.architecture if isinstance(config.values.get("architectures"), list) else ""
    tensors: dict[str, StoredTensor] = {}
    of_modules: list[StoredTensor] = []
    for file in files:
        for tensor in read_header(file):
            name = published_name(tensor.spec.name, architecture)
            if name != tensor.spec.name or stacked_by_transformers(name, architecture):
                of_modules.append(tensor)
            if name in tensors:
                raise ForgeError(
                    f"{name} is in {tensors[name].file.name} and in {file.name}", hint="Download the checkpoint again."
                )
            tensors[name] = (
                tensor if name == tensor.spec.name else replace(tensor, spec=replace(tensor.spec, name=name))
            )
    for stored, file_name in (weight_map or {}).items():
        name = published_name(stored, architecture)
        if name not in tensors or tensors[name].file.name != file_name:
            raise ForgeError(
                f"{index} lists {stored} in {file_name}, which does not contain it",
                hint="The index and the shards are of different downloads: fetch both again.",
            )
    block = config.fp8_blocks
    tensors = tensors if block is None else as_bfloat16(tensors, block)
    tensors = mxfp4_experts.as_bfloat16(tensors) if config.mxfp4_experts else tensors
    return HfCheckpoint(directory, config, by_expert(tensors, architecture), files, tuple(of_modules))


def is_path(source: str) -> bool:
    """Whether a model's name is a path, not a hub id (owner/name): by its form, or because its parent exists here."""
    return source.startswith((".", "/", "~")) or source.count("/") != 1 or Path(source).parent.is_dir()


def resolve_source(source: str, revision: str = "main", *, metadata_only: bool = False) -> Path:
    """A local directory, or that of a hub id, downloaded (or found in the offline cache) by huggingface_hub.

    `metadata_only` downloads config.json and the quantisation files only. The access token comes from the environment
    only. Raises ForgeError if the source is neither.
    """
    directory = Path(source)
    if directory.is_dir():
        return directory
    if is_path(source):
        near = nearest_directory(directory)
        hint = f"Did you mean {near}? {_GIVE}" if near else _GIVE
        if source.startswith("~") or "$" in source:  # in a recipe, which no shell expands
            hint = "Write the whole path: ~ and variables are not expanded here."
        repair = Repair(source, str(near)) if near else None
        raise ForgeError(f"{source}: no such directory", hint=hint).repaired_by(repair)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["config.json", *QUANTIZATION_FILES]
    if not metadata_only:
        wanted += [INDEX, "model*.safetensors", *TOKENIZER_FILES]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted, token=os.getenv("HF_TOKEN")))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ForgeError(
            f"{source} (revision {revision}) could not be fetched: {first_line(error)}",
            hint="Check the id, the network and HF_TOKEN, or give a local directory.",
        ) from None


def cached_source(source: str, revision: str = "main") -> Path | None:
    """The directory of a source on this machine, a local one or a snapshot in huggingface_hub's cache; None without."""
    directory = Path(source)
    if directory.is_dir():
        return directory
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:
        return None  # not a hub id: resolve_source raises the error
    return Path(config).parent if isinstance(config, str) else None


def tokenizer_name(path: Path) -> str:
    """The name of a tokenizer's file below its directory."""
    return TOOL_TEMPLATE_FILE if Path(TOOL_TEMPLATE_FILE).name == path.name else path.name


def copy_tokenizer_file(path: Path, directory: Path) -> None:
    """Copy a tokenizer's file to its place below another directory."""
    target = directory / tokenizer_name(path)
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(path.resolve(), target)


def tokenizer_files(directory: Path) -> tuple[Path, ...]:
    """The tokenizer's and generation configuration's files that are in `directory`."""
    return tuple(directory / name for name in TOKENIZER_FILES if (directory / name).is_file())


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard. Raises ForgeError for an index that has none."""
    weight_map = _read_json(index, "").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ForgeError(f"{index}: weight_map is missing or damaged", hint="Download the index again.")
    return weight_map


def _require_one_model(directory: Path, weight_map: Mapping[str, str]) -> None:
    """Raises ForgeError for a file of all weights beside an index of other files, as after two saves into one
    directory: transformers loads the single file, which may be the older one."""
    if (directory / SINGLE).is_file() and SINGLE not in weight_map.values():
        raise ForgeError(
            f"{directory} has a {SINGLE} beside the {INDEX} of other files: they may be of two models",
            hint=f"Remove the one that is not this model's ({SINGLE} is what transformers loads).",
        )


def _shard(directory: Path, name: str, index: Path) -> Path:
    path = directory / name
    if Path(name).name != name:
        raise ForgeError(f"{index}: {name} is not a plain file name", hint="Download the checkpoint again.")
    if not path.is_file():
        raise ForgeError(f"{path} is missing, but {index.name} lists it", hint="Download the missing shard.")
    return path


def _no_weights(directory: Path) -> ForgeError:
    if any(directory.glob("*.gguf")):
        return ForgeError(
            f"{directory} has GGUF weights, whose block formats TensorRT-LLM does not support",
            hint="Convert the original float16 or bfloat16 checkpoint; trtforge quantises it.",
        )
    if any(directory.glob("pytorch_model*.bin")):
        return ForgeError(
            f"{directory} holds pickled weights (pytorch_model.bin), which run code when loaded",
            hint="If you trust them, convert them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(OUT).",
        )
    shards = any(directory.glob("*.safetensors"))
    missing = "the index of the safetensors files" if shards else "the safetensors files"
    return ForgeError(f"{directory} has neither {SINGLE} nor {INDEX}", hint=f"Download {missing} of the checkpoint.")


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    return read_json_object(path, hint="Download the file again.", absent=hint or "Check the directory.")
