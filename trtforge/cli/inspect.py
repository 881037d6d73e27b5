"""`trtforge inspect` and `trtforge version`: describe a directory, and this installation."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trtforge.cli import show
from trtforge.cli.options import Json, Verbose
from trtforge.core import figures

_LABEL = 14  # columns of the labels


def inspect(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Artifact, build, Hugging Face model or Triton model repository.")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor: name, dtype, shape.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Describe a directory: what it is, its sizes and formats.

    A model is described with the formats that it can be served in. Only configuration files and safetensors headers
    are read.

    Example: trtforge inspect ./llama

    Example: trtforge inspect build/demo-int4awq/checkpoint --tensors
    """
    from trtforge.cli.chosen import located
    from trtforge.pipeline.description import describe

    directory = Path(located(str(directory)))
    found = describe(directory, tensors=tensors)
    if json:
        show.as_json(found)
        return
    kind = found["kind"].replace("hugging face", "Hugging Face")
    show.line(f"{show.path(directory)}: {kind}")
    for label, text in _lines(found):
        _print(label, text)
    formats = found.get("formats") or ()
    if formats:
        print(f"  {'formats':<{_LABEL}}{'':<14}weights in memory")
    for each in formats:
        how = "needs a calibration" if each["calibration"] else ""
        print(f"  {'':<{_LABEL}}{each['format']:<14}{show.size(each['bytes']):<10}{how}".rstrip())
    if tensors:
        _print_tensors(found["tensors"])


def _print(label: str, text: str) -> None:
    first, *others = show.wrapped(text, max(20, show.width() - _LABEL - 2)).splitlines() or [""]
    print(f"  {label:<{_LABEL}}{first}")
    for line in others:
        print(f"  {'':<{_LABEL}}{line}")


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Labels and texts of what was found."""
    for stage, part in found.get("artifacts", {}).items():
        yield f"{stage}/", show.size(part["bytes"])
    if "models" in found:
        yield "models", ", ".join(found["models"])
    if "architecture" in found:
        family = f" (family {found['family']})" if "family" in found else ""
        yield "architecture", f"{found['architecture']}{family}"
    if "parameters" in found:
        yield from _network(found)
    elif "layers" in found:
        yield "layers", str(found["layers"])
    if "backend" in found:
        yield "backend", found["backend"]
    for key in ("dtype", "quantization", "kv_cache"):
        if key in found:
            yield key.replace("_", " ").replace("kv", "KV"), str(found[key])
    if "tp" in found:
        yield "layout", f"tp {found['tp']}, pp {found['pp']}"
    if "medusa_heads" in found:
        yield "Medusa heads", str(found["medusa_heads"])
    if "eagle_networks" in found:
        yield "EAGLE networks", str(found["eagle_networks"])
    if "tokenizer" in found:
        yield "tokenizer", "yes" if found["tokenizer"] else "no tokenizer.json"
        yield "chat template", "yes" if found["chat_template"] else "no"
    if found.get("foreign"):
        adopted = "adopted: its files have digests, its source is not recorded"
        yield (
            "foreign",
            adopted if "digest" in found else "it has no forge.json: `trtforge adopt` checks it and writes it",
        )
    yield from _files(found)
    if "problem" in found:
        yield "problem", found["problem"]


def _network(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "parameters", figures.parameters(found["parameters"])
    yield "layers", f"{found['layers']} of hidden size {found['hidden_size']:,}"
    yield "heads", f"{found['heads']} of size {found['head_size']}, {found['kv_heads']} KV heads"
    if found["experts"]:
        yield "experts", str(found["experts"])
    yield "context", f"{found['context']:,} tokens, {found['kv_bytes_per_token']:,} bytes of KV cache each in 16 bits"
    yield "vocabulary", f"{found['vocabulary']:,} tokens"


def _files(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Sizes, digests and the configuration of an artifact."""
    if found.get("weight_files") == []:
        yield "weights", "not in this directory"
    elif "weight_files" in found:
        yield "weights", f"{show.size(found['bytes'])}, {figures.counted(len(found['weight_files']), 'file')}"
    elif "bytes" in found:
        files = f" in {figures.counted(found['files'], 'file')}" if "files" in found else ""
        yield "size", f"{show.size(found['bytes'])}{files}"
    if "configuration" in found:
        for number, setting in enumerate(_settings(found["configuration"])):
            yield "configuration" if number == 0 else "", setting
    inputs = found.get("inputs", {})
    named = {name: digest for name, digest in inputs.items() if "/" not in name}
    for number, (name, digest) in enumerate(named.items()):
        yield "made from" if number == 0 else "", f"{name} {digest[:16]}…"
    if len(inputs) > len(named):
        others = figures.counted(len(inputs) - len(named), "other file")
        yield "" if named else "made from", f"{others} (--json lists them)"
    if "digest" in found:
        yield "digest", found["digest"]
        yield "written by", ", ".join(f"{name} {release}" for name, release in found["versions"].items())


def _settings(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Settings as `key value`, nested keys with dots; those that are unset are left out."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{before}{key}.")
        elif value not in (None, "", [], {}):
            yield f"{before}{key} {value}"


def _print_tensors(tensors: Sequence[Mapping[str, Any]]) -> None:
    """Every tensor below the name of its file."""
    file = None
    for tensor in tensors:
        if tensor["file"] != file:
            file = tensor["file"]
            print(f"\n{file}")
        print(f"  {tensor['name']}\n    {tensor['dtype']} {'×'.join(map(str, tensor['shape'])) or 'scalar'}")


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
