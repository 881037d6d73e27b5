"""Floor 5: describe a directory (artifact, build, model or repository) from configuration and headers alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from trtforge.core.builds import require_one_build
from trtforge.core.errors import ForgeError, Repair
from trtforge.core.manifest import FILE_NAME, Manifest, Stage, is_foreign, read_manifest
from trtforge.core.nearest import no_directory
from trtforge.core.recipe import QuantFormat, Recipe
from trtforge.formats.chat_template import read_chat_template
from trtforge.formats.eagle_checkpoint import networks_in
from trtforge.formats.hf import CONFIG, HfConfig, open_checkpoint, read_config
from trtforge.formats.medusa import heads_in
from trtforge.formats.quantization_config import quantization_method
from trtforge.formats.shards import read_header
from trtforge.formats.triton import CONFIG_FILE as REPOSITORY_CONFIG
from trtforge.formats.trtllm import (
    CheckpointConfig,
    is_engine,
    is_hugging_face,
    read_checkpoint_config,
    read_engine_config,
)
from trtforge.models.formats import FORMATS
from trtforge.models.registry import architectures, family_of
from trtforge.pipeline.summary import parameters
from trtforge.plan.evaluate import evaluate
from trtforge.plan.kv import bytes_per_token
from trtforge.plan.model import Model, model_at
from trtforge.plan.request import request_of


def describe(directory: Path, *, tensors: bool) -> dict[str, Any]:
    """The facts of a directory. Raises ForgeError if trtforge does not recognise it."""
    if not directory.is_dir():
        raise _no_directory(directory)
    require_one_build(directory)
    manifest = read_manifest(directory)
    parts = {stage: found for stage in get_args(Stage) if (found := _part(directory, stage)) is not None}
    if manifest is not None:
        found = _artifact(directory, manifest)
    elif (directory / CONFIG).is_file():
        found = hugging_face(directory) if is_hugging_face(directory) else _foreign(directory)
    elif parts:
        found = {"kind": "build", "artifacts": parts, "bytes": sum(part["bytes"] for part in parts.values())}
    elif models := sorted(path.parent.name for path in directory.glob(f"*/{REPOSITORY_CONFIG}")):
        found = {"kind": "Triton model repository that trtforge did not write", "models": models}
    else:
        raise ForgeError(
            f"{directory} is neither a trtforge artifact nor a checkpoint",
            hint=f"An artifact has a {FILE_NAME}, a Hugging Face checkpoint a {CONFIG}.",
        )
    if tensors:
        found["tensors"] = _tensors(directory)
    return found


def _no_directory(path: Path) -> ForgeError:
    if path.is_file():
        known = _is_known(path.parent)
        give = "Give its directory." if known else "Give the directory of an artifact, a build or a model."
        error = ForgeError(f"{path} is a file", hint=give)
        return error.repaired_by(Repair(str(path), str(path.parent)) if known else None)
    return no_directory(path, otherwise="Give an artifact or a checkpoint directory.")


def _is_known(directory: Path) -> bool:
    try:
        describe(directory, tensors=False)
    except ForgeError:
        return False
    return True


def _part(directory: Path, stage: str) -> dict[str, Any] | None:
    manifest = read_manifest(directory / stage) if (directory / stage).is_dir() else None
    if manifest is None:
        return None
    return {"path": str(directory / stage), "bytes": manifest.total_bytes, "digest": manifest.digest}


def _artifact(directory: Path, manifest: Manifest) -> dict[str, Any]:
    identity = manifest.identity
    found: dict[str, Any] = {
        "kind": identity.stage,
        "bytes": manifest.total_bytes,
        "files": len(manifest.files),
        "digest": manifest.digest,
        "configuration": identity.config,
        "inputs": identity.inputs,
        "versions": identity.versions,
    }
    if identity.stage == "engine" and identity.config.get("backend") == "llmapi":
        weights = {key: value for key, value in hugging_face(directory).items() if key not in found}
        return found | {"backend": "llmapi"} | weights
    if identity.stage in ("checkpoint", "engine"):
        found |= _trtllm(directory)
    return found | ({"foreign": True} if is_foreign(manifest) else {})


def _foreign(directory: Path) -> dict[str, Any]:
    """A TensorRT-LLM checkpoint or engine without a manifest."""
    what = "engine" if is_engine(directory) else "checkpoint"
    return {"kind": f"TensorRT-LLM {what} that trtforge did not write"} | _trtllm(directory) | {"foreign": True}


def _trtllm(directory: Path) -> dict[str, Any]:
    backend: dict[str, Any] = {}
    model: CheckpointConfig
    if is_engine(directory):
        model, whole = read_engine_config(directory)
        forge = whole.get("forge")
        backend["backend"] = forge.get("backend", "torch") if isinstance(forge, dict) else "tensorrt_llm"
    else:
        model = read_checkpoint_config(directory)
    heads, networks = heads_in(model), networks_in(model)
    return backend | {
        "architecture": model.architecture,
        "dtype": model.dtype,
        "quantization": model.quantization.quant_algo or "none",
        "kv_cache": model.quantization.kv_cache_quant_algo or "none",
        "tp": model.parallel.tp,
        "pp": model.parallel.pp,
        "layers": model.num_hidden_layers,
        **({} if heads is None else {"medusa_heads": heads[0]}),
        **({} if networks is None else {"eagle_networks": networks}),
    }


def hugging_face(directory: Path) -> dict[str, Any]:
    """A Hugging Face checkpoint: its network, its files and the formats in which it can be served.

    Figures of missing weights are None. A model that cannot be converted has no formats; `problem` gives the reason.
    Raises ForgeError for damaged files.
    """
    config = read_config(directory)
    weights: dict[str, Any] = {"bytes": None, "tensors_stored": None, "weight_files": []}
    if any(directory.glob("*.safetensors")) or any(directory.glob("*.bin")):
        checkpoint = open_checkpoint(directory)
        weights = {
            "bytes": checkpoint.stored_bytes,
            "tensors_stored": len(checkpoint.tensors),
            "weight_files": [path.name for path in checkpoint.weight_files],
        }
    known = config.architecture in architectures()
    network, formats, problem = _planned(directory) if known else ({}, [], None)
    return {
        "kind": "hugging face checkpoint",
        "architecture": config.architecture,
        "family": family_of(config.architecture).name if known else "not supported",
        "dtype": config.dtype,
        "quantization": _quantization(config),
        **network,
        "tokenizer": (directory / "tokenizer.json").is_file(),
        "chat_template": read_chat_template(directory) is not None,
        **weights,
        "formats": formats,
        **({"problem": problem} if problem is not None else {}),
    }


def _quantization(config: HfConfig) -> str:
    method, block = quantization_method(config), config.fp8_blocks
    return method if block is None else f"{method}, blocks of {block[0]} x {block[1]}"


def _planned(directory: Path) -> tuple[Mapping[str, Any], list[dict[str, Any]], str | None]:
    """The network and the formats of a model of a known architecture, or the reason why they are unknown."""
    network: Mapping[str, Any] = {}
    try:
        model = model_at(str(directory), directory)
        network = {"family": model.family.name, **_network(model)}
        return network, _formats(model), None
    except ForgeError as error:
        return network, [], error.message


def _network(model: Model) -> Mapping[str, Any]:
    sizes = model.facts.sizes
    return {
        "parameters": parameters(model),
        "layers": sizes.num_layers,
        "hidden_size": sizes.hidden,
        "heads": sizes.num_heads,
        "kv_heads": sizes.num_kv_heads,
        "head_size": sizes.head_size,
        "experts": sizes.of("experts") if model.facts.sparse_layers else 0,
        "context": sizes.max_positions,
        "vocabulary": sizes.vocab,
        "kv_bytes_per_token": bytes_per_token(sizes, 2),
    }


def _formats(model: Model) -> list[dict[str, Any]]:
    """The formats in which the model can be served on one GPU, with the bytes of its weights there."""
    recipe = Recipe.parse({"name": "inspect", "model": {"source": model.name}}, "inspect")
    names = (model.stored.format,) if model.stored is not None else get_args(QuantFormat)
    found = []
    for name in names:
        evaluation = evaluate(model, request_of(recipe, model, {"--quant": name}))
        if evaluation.legal and evaluation.memory is not None:
            needs = FORMATS[name].calibrated and model.stored is None
            shown = name if model.stored is None else model.stored.described
            found.append({"format": shown, "bytes": evaluation.memory.weights, "calibration": needs})
    return found


def _tensors(directory: Path) -> list[dict[str, Any]]:
    return [
        {
            "file": path.relative_to(directory).as_posix(),
            "name": t.spec.name,
            "dtype": t.spec.dtype.name,
            "shape": list(t.spec.shape),
        }
        for path in sorted(directory.rglob("*.safetensors"))
        for t in read_header(path)
    ]
