"""Floor 5: `forge.lock` pins the model's content and all versions that the builds of the recipes beside it used.

It is meant to be committed: no times, host names or absolute paths. The next build uses the pinned revisions of the
model and of datasets, and warns of other differences; `--locked` refuses them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.errors import AbsentFile, ForgeError
from trtforge.core.locks import locked_by
from trtforge.core.recipe import Recipe
from trtforge.core.replace import replace_text
from trtforge.core.yaml_text import read_yaml
from trtforge.formats.hub_data import pinned_to

FILE_NAME = "forge.lock"
_VERSION = 1
_RESTORE = "Restore it from version control, or delete it and build with --update-lock."
_RESTORED = {
    "model": "restore the locked model",
    "data": "restore the locked data",
    "engine": "install the locked versions",
    "versions": "install the locked versions",
}
_HEADER = "# Written by `trtforge build --update-lock`: what each recipe was built with. Commit it; do not edit it.\n"


class LockedModel(Config):
    """The model's content: the commit of a hub id, or the digest of a directory."""

    source: str = Field(description="Hub id, or the directory relative to the lock file.")
    revision: str | None = Field(None, description="The recipe's revision: a branch, tag or commit on the hub.")
    commit: str | None = Field(None, description="The commit that the revision resolved to.")
    digest: str | None = Field(None, description="BLAKE3 of a directory's configuration, weights and tokenizer.")


class LockedDataset(Config):
    """A dataset of the hub."""

    source: str = Field(description="The recipe's name of it.")
    commit: str = Field(description="The commit that its revision resolved to.")


class LockedEngine(Config):
    """The versions that build the engine. None: not used by this build, or unknown when it was locked."""

    backend: str
    tensorrt_llm: str | None = None
    tensorrt: str | None = None
    cuda: str | None = None
    image: str | None = Field(None, description="The container image, if TensorRT-LLM is not installed.")
    image_digest: str | None = Field(None, description="The image's repository digest.")


class LockedBuild(Config):
    """One recipe's build."""

    model: LockedModel
    data: dict[str, str | LockedDataset] = Field(
        default_factory=dict,
        description="Data by purpose (calibration, gate): the BLAKE3 of a file or the commit of a dataset.",
    )
    engine: LockedEngine
    versions: dict[str, str]


class _Lock(Config):
    version: Literal[1] = 1
    recipes: dict[str, LockedBuild] = Field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A field in which a build differs from the lock."""

    field: str
    locked: str
    found: str

    def __str__(self) -> str:
        return f"{self.field}: locked {self.locked}, found {self.found}"


def read_locked(path: Path, recipe: str) -> LockedBuild | None:
    """A recipe's entry in the lock file; None without a file or an entry. Raises ForgeError for an invalid file."""
    return _read(path).recipes.get(recipe)


def write_locked(path: Path, recipe: str, build: LockedBuild) -> None:
    """Write a recipe's entry to the lock file; other entries are kept. Raises ForgeError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked_by(path.with_name(f".{path.name}.lock")):
            lock = _Lock(recipes={**_read(path).recipes, recipe: build})
            text = yaml.safe_dump(lock.model_dump(mode="json", exclude_none=True), width=120)
            replace_text(path, _HEADER + text)
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}", hint="Choose another file with --lock.") from None


def pinned(recipe: Recipe, locked: LockedBuild) -> Recipe:
    """The recipe with the locked commits of its model and datasets, if it still uses the same ones."""
    model, samples, gate = recipe.model, recipe.quantization.calibration, recipe.gate
    if locked.model.commit is not None and (model.source, model.revision) == (
        locked.model.source,
        locked.model.revision,
    ):
        model = model.model_copy(update={"revision": locked.model.commit})
    samples = samples.model_copy(update={"data": _pinned_data(samples.data, locked.data.get("calibration"))})
    gate = gate.model_copy(update={"data": _pinned_data(gate.data, locked.data.get("gate"))})
    quantization = recipe.quantization.model_copy(update={"calibration": samples})
    return recipe.model_copy(update={"model": model, "quantization": quantization, "gate": gate})


def _pinned_data(data: str, locked: str | LockedDataset | None) -> str:
    if isinstance(locked, LockedDataset) and locked.source == data:
        return pinned_to(data, locked.commit)
    return data


def pinned_image(locked: LockedBuild, found: LockedBuild) -> str | None:
    """The locked image by digest, if the build uses that image and the lock has its digest."""
    image, digest = locked.engine.image, locked.engine.image_digest
    if image is None or digest is None or found.engine.image != image:
        return None
    return f"{repository_of(image)}@{digest}"


def repository_of(image: str) -> str:
    """An image's name without tag or digest; a colon before a slash separates a port."""
    name = image.partition("@")[0]
    head, _, tag = name.rpartition(":")
    return head if head and "/" not in tag else name


def differences(locked: LockedBuild, found: LockedBuild) -> tuple[Difference, ...]:
    """The fields in which `found` differs from the lock.

    A model directory is compared by content, not by path. An image's digest is compared only if both are known: an
    image that has not been pulled has none.
    """
    ours, theirs = dict(_flat(locked.model_dump(mode="json"))), dict(_flat(found.model_dump(mode="json")))
    ignored = set()
    if locked.model.digest is not None and found.model.commit is None:
        ignored.add("model.source")
    if found.model.digest is None:
        ignored.add("model.digest")  # the weights were not read, or the model is not a directory
    if locked.engine.image_digest is None or found.engine.image_digest is None:
        ignored.add("engine.image_digest")
    return tuple(
        Difference(name, ours.get(name) or "nothing", theirs.get(name) or "nothing")
        for name in dict.fromkeys((*ours, *theirs))
        if name not in ignored and ours.get(name) != theirs.get(name)
    )


def require_locked(path: Path, recipe: str, locked: LockedBuild | None, found: LockedBuild) -> None:
    """Raise ForgeError if the recipe is not locked or a build would differ; the message names every field."""
    if locked is None:
        missing = f"{path} has no entry for {recipe}" if path.exists() else f"{path} does not exist"
        raise ForgeError(f"--locked: {missing}", hint="Build with --update-lock once, and commit the file.")
    if found_differences := differences(locked, found):
        said = "; ".join(map(str, found_differences))
        raise ForgeError(
            f"{path}: {recipe} would not be built as locked: {said}",
            hint=f"{_restored(found_differences)}, or update the lock with --update-lock.",
        )


def _restored(found: Sequence[Difference]) -> str:
    """How to restore the locked state, for each part of the lock that differs."""
    parts = {difference.field.partition(".")[0] for difference in found}
    said = ", ".join(dict.fromkeys(what for part, what in _RESTORED.items() if part in parts))
    return said[:1].upper() + said[1:]


def _read(path: Path) -> _Lock:
    try:
        values = read_yaml(path, hint=_RESTORE)
    except AbsentFile:
        return _Lock()
    if not isinstance(values, dict):
        raise ForgeError(f"{path}: not a lock file: not a mapping", hint=_RESTORE)
    if values.get("version") != _VERSION:
        raise ForgeError(f"{path}: written by another version of trtforge", hint=_RESTORE)
    return _Lock.parse(values, str(path))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
