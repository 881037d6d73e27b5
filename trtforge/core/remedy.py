"""Hints for damaged artifacts; for a Triton repository, the command that writes it again, from its manifest."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

from trtforge.core.digest import file_digest
from trtforge.core.features import FeaturesConfig
from trtforge.core.operands import operand
from trtforge.core.serving import ServingConfig

if TYPE_CHECKING:
    from trtforge.core.manifest import Manifest

_ENGINE, _DRAFT, _TOKENIZER = "*tensorrt_llm/1/engine", "*tensorrt_llm_draft/1/engine", "*preprocessing/1/tokenizer"


def remedy(directory: Path, manifest: "Manifest", fault: str) -> str:
    """The hint for an artifact with this fault, which begins with the path of the wrong file."""
    if manifest.identity.stage != "repository":
        return "Delete the directory and build it again."
    engine = _engine_for(directory, manifest, fault)
    command = join(
        ["trtforge", "package", operand(engine), operand(directory), *_options(directory, manifest, engine, fault)]
    )
    again = f"`{command}` writes it again; --set serving.KEY=VALUE changes a setting."
    return f"Compile the engine again, whose file this is; then {again}" if _is_of(engine, directory, fault) else again


def _is_of(engine: str, repository: Path, fault: str) -> bool:
    """Whether the wrong file is a hard link to the engine's."""
    parts = [(part, Path(engine)) for part in repository.glob(_ENGINE)]
    pairs = [(path, own / path.relative_to(part)) for part, own in parts for path in part.rglob("*") if path.is_file()]
    return any(fault.startswith(f"{path} ") and own.is_file() and path.samefile(own) for path, own in pairs)


def _engine_for(repository: Path, manifest: "Manifest", fault: str) -> str:
    """The engine in the same build, else the one in the repository."""
    from trtforge.core.manifest import read_manifest

    beside = repository.parent / "engine"
    found = read_manifest(beside) if beside.is_dir() else None
    same = found is not None and found.digest == manifest.identity.inputs.get("engine")
    return str(beside) if same else _part(repository, _ENGINE, fault) or "ENGINE"


def _part(repository: Path, pattern: str, fault: str) -> str | None:
    """A directory of the repository; None if it has none, or the fault is in it."""
    found = next(iter(sorted(repository.glob(pattern))), None)
    return None if found is None or fault.startswith(f"{found}/") else str(found)


def _options(repository: Path, manifest: "Manifest", engine: str, fault: str) -> Iterator[str]:
    """The options of `trtforge package` that differ from its defaults."""
    identity = manifest.identity
    config = identity.config.get("package", {})
    if not _has_tokenizer(Path(engine), identity.inputs):
        yield from ("--tokenizer", _part(repository, _TOKENIZER, fault) or "DIR")
    if config.get("name_prefix"):
        yield from ("--name", config["name_prefix"])
    for key, value in _changed(config.get("serving"), ServingConfig().model_dump(mode="json")):
        yield from ("--set", f"serving.{key}={value}")
    if "draft_engine" in identity.inputs:
        yield from ("--set", f"serving.draft_engine={_part(repository, _DRAFT, fault) or 'DRAFT_ENGINE'}")
    for key, value in _changed(config.get("features"), FeaturesConfig().model_dump(mode="json")):
        yield from ("--feature", f"{key}={value}")


def _has_tokenizer(engine: Path, inputs: Mapping[str, str]) -> bool:
    """Whether the tokenizer in an engine is the one that was packaged."""
    packaged = [(name, digest) for name, digest in inputs.items() if name.startswith("tokenizer/")]
    return all((engine / name).is_file() and file_digest(engine / name) == digest for name, digest in packaged)


def _changed(values: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in (values or {}).items():
        if value != defaults.get(key):
            yield key, value if isinstance(value, str) else json.dumps(value)
