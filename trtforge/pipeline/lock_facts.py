"""Floor 5: the model content, versions and image that a build of a recipe uses now, in the form of `forge.lock`."""

import os
import platform
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from trtforge.compile.build_site import ContainerSite
from trtforge.compile.build_site_choice import chosen_site
from trtforge.compile.machine import this_machine
from trtforge.compile.stage import backend_of
from trtforge.core.digest import file_digest, text_digest
from trtforge.core.errors import ForgeError
from trtforge.core.packages import installed_version
from trtforge.core.recipe import Recipe
from trtforge.formats.corpus import require_data
from trtforge.formats.hf import open_checkpoint, resolve_source, tokenizer_files, tokenizer_name
from trtforge.formats.hub_data import PREFIX, commit_of
from trtforge.formats.quantization_config import quantization_files
from trtforge.formats.releases import containers_of, release
from trtforge.machine.host import DOCKER_TIMEOUT, Host, RunError
from trtforge.pipeline.lock import LockedBuild, LockedDataset, LockedEngine, LockedModel, pinned, repository_of
from trtforge.pipeline.stages import needs_calibration
from trtforge.pipeline.summary import is_quantized
from trtforge.serve.host_checks import installed

_PACKAGES = ("trtforge", "torch", "transformers", "tokenizers", "safetensors")
"""The packages whose versions determine the bytes of an artifact."""


def what_is_used(
    recipe: Recipe,
    lock: Path,
    locked: LockedBuild | None = None,
    *,
    container: str | None = None,
    contents: bool = True,
    host: Host | None = None,
) -> LockedBuild:
    """The inputs of a build of `recipe` now, at the locked commit if there is one. `lock`: path of the lock file.

    `container`: the value of `trtforge build --container`. `contents`: require all digests; a local model's weights are
    then read once, and the hub must be reachable for datasets. Only the configuration of a hub model and the commit of
    a dataset are fetched.
    """
    return LockedBuild(
        model=_model(recipe, lock, locked, contents=contents),
        data=_data(recipe, locked, strict=contents),
        engine=_engine(recipe, container, host or Host()),
        versions={"python": platform.python_version()} | dict(_versions()),
    )


def with_image(
    used: LockedBuild, recipe: Recipe, container: str | None = None, host: Host | None = None
) -> LockedBuild:
    """`used` after the build, with the digest of an image that was pulled for it."""
    return used.model_copy(update={"engine": _engine(recipe, container, host or Host())})


def _model(recipe: Recipe, lock: Path, locked: LockedBuild | None, *, contents: bool) -> LockedModel:
    model = recipe.model
    if Path(model.source).is_dir():
        relative = Path(os.path.relpath(model.source, lock.absolute().parent)).as_posix()
        return LockedModel(source=relative, digest=_source_digest(Path(model.source)) if contents else None)
    chosen = pinned(recipe, locked).model if locked is not None else model
    snapshot = resolve_source(chosen.source, chosen.revision, metadata_only=True)
    return LockedModel(source=model.source, revision=model.revision, commit=snapshot.name)


def _source_digest(directory: Path) -> str:
    """Digest of the names and digests of all files that conversion reads."""
    digests = open_checkpoint(directory).digests
    others = {
        tokenizer_name(path): file_digest(path)
        for path in (*quantization_files(directory), *tokenizer_files(directory))
    }
    return text_digest("".join(f"{name} {digest}\n" for name, digest in sorted((digests | others).items())))


def _data(recipe: Recipe, locked: LockedBuild | None, *, strict: bool) -> dict[str, str | LockedDataset]:
    """The data files and hub datasets that a build reads; builtin:stdlib is pinned by Python's version.

    Missing data and unknown commits are omitted, or raise ForgeError if `strict`.
    """
    at = pinned(recipe, locked) if locked is not None else recipe
    found: dict[str, str | LockedDataset] = {}
    for purpose, name, chosen in (
        ("calibration", recipe.quantization.calibration.data, at.quantization.calibration.data),
        ("gate", recipe.gate.data, at.gate.data),
    ):
        if purpose == "calibration" and not needs_calibration(recipe, quantized=is_quantized(at)):
            continue
        if name.startswith(PREFIX):
            with nullcontext() if strict else suppress(ForgeError):
                found[purpose] = LockedDataset(source=name, commit=commit_of(chosen))
        elif Path(name).is_file():
            found[purpose] = file_digest(Path(name))
        elif strict:
            require_data(name)
    return found


def _engine(recipe: Recipe, container: str | None, host: Host) -> LockedEngine:
    backend = backend_of(recipe.engine)
    if backend != "tensorrt_llm":
        return LockedEngine(backend=backend)
    wanted, here = release(recipe.engine.target.tensorrt_llm), installed().offers
    place = chosen_site(container, wanted, this_machine(), Path())
    if not isinstance(place, ContainerSite):
        return LockedEngine(backend=backend, tensorrt_llm=wanted.version, tensorrt=here.tensorrt, cuda=here.cuda)
    carried = next((known for known in containers_of(wanted) if known.image == place.image), None)
    return LockedEngine(
        backend=backend,
        tensorrt_llm=carried.tensorrt_llm if carried else wanted.version,
        tensorrt=carried.tensorrt if carried else None,
        cuda=carried.cuda if carried else None,
        image=place.image,
        image_digest=_image_digest(place.image, host),
    )


def _image_digest(image: str, host: Host) -> str | None:
    """The repository digest of a pulled image; None if docker does not report one."""
    docker = host.program("docker")
    if docker is None:
        return None
    command = [docker, "image", "inspect", "--format", '{{join .RepoDigests "\\n"}}', image]
    try:
        answer = host.run(command, timeout=DOCKER_TIMEOUT)
    except RunError:
        return None
    digests = (line.strip().partition("@") for line in answer.splitlines())
    return next((digest for name, _, digest in digests if name == repository_of(image) and digest), None)


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        found = installed_version(name)
        if found is not None:
            yield name, found
