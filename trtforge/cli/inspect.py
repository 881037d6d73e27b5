"""`trtforge inspect` and `trtforge version`: describe a directory, and this installation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import show
from trtforge.cli.options import Json, Verbose
from trtforge.core.errors import ForgeError

if TYPE_CHECKING:
    from trtforge.core.manifest import Manifest


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Artifact or Hugging Face checkpoint.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor: name, dtype, shape.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Describe a directory: family, dtype, layout, quantisation.

    Only configuration files and safetensors headers are read.

    Example: trtforge inspect build/demo-int4awq/checkpoint --tensors
    """
    found = describe(directory, tensors=tensors)
    if json:
        show.as_json(found)
        return
    listing = found.pop("tensors", None)
    show.table(str(directory), ["what", "value"], [[key, _text(value)] for key, value in found.items()])
    if listing is not None:
        rows = [[f"{t['file']}  {t['name']}", t["dtype"], "×".join(map(str, t["shape"]))] for t in listing]
        show.table("Tensors", ["tensor", "dtype", "shape"], rows)


def describe(directory: Path, *, tensors: bool) -> dict[str, Any]:
    """The facts of a directory. Raises ForgeError if it is neither an artifact nor a checkpoint."""
    from trtforge.core.manifest import read_manifest

    if not directory.is_dir():
        raise ForgeError(f"{directory}: no such directory", hint="Give an artifact or a checkpoint directory.")
    manifest = read_manifest(directory)
    if manifest is not None:
        found = _artifact(directory, manifest)
    elif (directory / "config.json").is_file():
        found = _hugging_face(directory)
    else:
        raise ForgeError(
            f"{directory} is neither a trtforge artifact nor a checkpoint",
            hint="An artifact has a forge.json, a Hugging Face checkpoint a config.json.",
        )
    if tensors:
        found["tensors"] = _tensors(directory)
    return found


def _artifact(directory: Path, manifest: "Manifest") -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": manifest.identity.stage,
        "bytes": manifest.total_bytes,
        "files": len(manifest.files),
        "digest": manifest.digest,
        "configuration": manifest.identity.config,
        "inputs": manifest.identity.inputs,
        "versions": manifest.identity.versions,
    }
    if manifest.identity.config.get("backend") == "llmapi" and manifest.identity.stage == "engine":
        weights = {key: value for key, value in _hugging_face(directory).items() if key not in found}
        return found | {"backend": "llmapi"} | weights
    if manifest.identity.stage in ("checkpoint", "engine"):
        from trtforge.formats.trtllm import read_checkpoint_config, read_engine_config

        if manifest.identity.stage == "engine":
            model, whole = read_engine_config(directory)
            forge = whole.get("forge")
            found["backend"] = forge.get("backend", "torch") if isinstance(forge, dict) else "tensorrt_llm"
        else:
            model = read_checkpoint_config(directory)
        found |= {
            "architecture": model.architecture,
            "dtype": model.dtype,
            "quantization": model.quantization.quant_algo or "none",
            "kv_cache": model.quantization.kv_cache_quant_algo or "none",
            "tp": model.parallel.tp,
            "pp": model.parallel.pp,
            "layers": model.num_hidden_layers,
        }
    return found


def _hugging_face(directory: Path) -> dict[str, Any]:
    from trtforge.formats.hf import open_checkpoint
    from trtforge.formats.quantization_config import quantization_method
    from trtforge.models.registry import architectures, family_of

    checkpoint = open_checkpoint(directory)
    architecture = checkpoint.config.architecture
    known = architecture in architectures()
    return {
        "kind": "hugging face checkpoint",
        "architecture": architecture,
        "family": family_of(architecture).name if known else "not supported",
        "dtype": checkpoint.config.dtype,
        "quantization": quantization_method(checkpoint.config),
        "bytes": sum(tensor.spec.nbytes for tensor in checkpoint.tensors.values()),
        "tensors_stored": len(checkpoint.tensors),
        "weight_files": [path.name for path in checkpoint.weight_files],
    }


def _tensors(directory: Path) -> list[dict[str, Any]]:
    from trtforge.formats.shards import read_header

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


def version(json: Json = False, verbose: Verbose = False) -> None:
    """Print the versions of trtforge, Python and related packages.

    Example: trtforge version --json
    """
    import platform

    from trtforge import __version__
    from trtforge.core.packages import installed_version

    found = {"trtforge": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tritonclient", "nvidia-pytriton", "tensorrt-llm", "nvidia-modelopt"):
        found[name] = installed_version(name) or "not installed"
    if json:
        show.as_json(found)
        return
    for name, value in found.items():
        print(f"{name} {value}")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {item}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
