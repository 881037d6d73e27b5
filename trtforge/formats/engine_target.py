"""Compares the versions and GPU of an engine's build with those of an environment in which it will run.

TensorRT loads a plan only in the exact version that wrote it and on the compute capability it was tuned for; its
plugins belong to one TensorRT-LLM release. TensorRT-LLM does not compare versions when it loads an engine
(cpp/tensorrt_llm/runtime/gptJsonConfig.cpp), so the server would fail late, with an assertion.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Container, containers_of, release

FieldName = Literal["tensorrt_llm", "tensorrt", "cuda", "sm", "gpu"]


class EngineTarget(Config):
    """The versions and GPU for which a TensorRT-LLM engine was built, or those of an environment. None: unknown."""

    tensorrt_llm: str | None = Field(None, description="TensorRT-LLM release, such as 1.2.1.")
    tensorrt: str | None = Field(None, description="TensorRT's version, all four parts, such as 10.14.1.48.")
    cuda: str | None = Field(None, description="CUDA's version, such as 13.1.")
    sm: str | None = Field(None, pattern=r"^\d+$", description="Compute capability x 10, such as 90.")
    gpu: str | None = Field(None, description="The GPU as the driver names it, such as NVIDIA H100 80GB HBM3.")

    @property
    def versions(self) -> dict[str, str]:
        """The known values, for `Identity.versions` of the engine's manifest: other values mean another engine."""
        return {name: str(value) for name, value in self.model_dump(exclude_none=True).items()}

    @classmethod
    def recorded(cls, versions: Mapping[str, str]) -> "EngineTarget | None":
        """The target in the versions of an engine's manifest; None if the engine does not record one."""
        found = {name: versions[name] for name in cls.model_fields if name in versions}
        return cls.parse(found, "forge.json: versions") if found else None


@dataclass(frozen=True)
class TargetEnvironment:
    """An environment for an engine. `sure`: its versions were detected there, or no source contradicts them."""

    name: str
    offers: EngineTarget
    sure: bool = True

    @classmethod
    def of_container(cls, container: Container) -> "TargetEnvironment":
        """The environment of a container image, from the release data."""
        offers = EngineTarget(tensorrt_llm=container.tensorrt_llm, tensorrt=container.tensorrt, cuda=container.cuda)
        return cls(f"the image {container.image}", offers, sure=container.confidence == "high")


@dataclass(frozen=True)
class Difference:
    """A field in which an environment differs from an engine's target. `stops`: the engine cannot run there."""

    field: FieldName
    built: str
    found: str
    stops: bool

    def said(self, place: str) -> str:
        """The difference as a sentence; `place` is the environment's name."""
        rule = _RULES[self.field]
        return f"the engine was built {rule.built} {rule.label} {self.built}, {place} has {rule.label} {self.found}"


@dataclass(frozen=True)
class _Rule:
    """A field's label, its preposition (built with, built for), and the consequence of a different value.

    `parts`: number of leading numbers of a version to compare; None: the whole value.
    """

    label: str
    built: str
    consequence: str
    stops: bool
    parts: int | None = None


_RULES: Mapping[FieldName, _Rule] = {
    "tensorrt_llm": _Rule("TensorRT-LLM", "with", "an engine runs only with the release that built it", stops=True),
    "tensorrt": _Rule("TensorRT", "with", "an engine loads only in the TensorRT version that built it", True, parts=4),
    "sm": _Rule("SM", "for", "an engine runs only on the compute capability it was built for", stops=True),
    "cuda": _Rule("CUDA", "with", "it runs, with kernels chosen for another CUDA version", False, parts=1),
    "gpu": _Rule("GPU", "for", "it runs, with kernels tuned for another GPU", stops=False),
}
"""In the order of reporting: differences that stop an engine first."""


def differences(built: EngineTarget, place: EngineTarget) -> tuple[Difference, ...]:
    """How `place` differs from an engine's target, blocking differences first. Unknown values count as equal.

    Another GPU of the same compute capability, or another CUDA major version under the same TensorRT, runs the engine,
    but its kernels were tuned for the original one.
    """
    found = []
    for name, rule in _RULES.items():
        ours, theirs = getattr(built, name), getattr(place, name)
        if ours is not None and theirs is not None and not _same(ours, theirs, rule.parts):
            found.append(Difference(name, ours, theirs, rule.stops))
    return tuple(found)


def require_fit(built: EngineTarget, place: TargetEnvironment) -> tuple[str, ...]:
    """Warnings about running an engine in `place`. Raises ForgeError, naming both values, if it cannot run there."""
    warnings = []
    for difference in differences(built, place.offers):
        said = difference.said(place.name)
        if difference.stops and place.sure:
            raise ForgeError(said, hint=_hint(built, difference))
        warnings.append(f"{said}: {_RULES[difference.field].consequence}")
    return tuple(warnings)


def unknown_origin(built: EngineTarget) -> str | None:
    """The warning about an engine that does not record its TensorRT or GPU; None if both are known."""
    missing = [_RULES[name].label for name in ("tensorrt", "sm") if getattr(built, name) is None]
    if not missing:
        return None
    said = f"the engine does not record its {' and '.join(missing)}"
    return f"{said}, so compatibility cannot be checked before the server loads it"


def images_for(built: EngineTarget) -> tuple[str, ...]:
    """The container images with exactly an engine's TensorRT-LLM and TensorRT, the newest first."""
    if built.tensorrt_llm is None:
        return ()
    try:
        containers = containers_of(release(built.tensorrt_llm))
    except ForgeError:
        return ()  # an unknown release
    places = ((container.image, TargetEnvironment.of_container(container).offers) for container in containers)
    return tuple(image for image, offers in places if not any(d.stops for d in differences(built, offers)))


def _hint(built: EngineTarget, difference: Difference) -> str:
    reason = _RULES[difference.field].consequence
    why = reason[0].upper() + reason[1:]
    again = "trtforge compile CHECKPOINT OUT --backend tensorrt_llm"
    if difference.field == "sm":
        return f"{why}: run `{again}` on that GPU, or use one with SM {difference.built}."
    version = f" --target-version {difference.found}" if difference.field == "tensorrt_llm" else ""
    images = images_for(built)
    instead = f", or serve it with {images[0]}" if images else ""
    return f"{why}: run `{again}{version}` there{instead}."


def _same(ours: str, theirs: str, parts: int | None) -> bool:
    """Compares the leading version numbers that both have: packages add build numbers and .post1."""
    if parts is None:
        return ours == theirs
    pairs = zip(re.findall(r"\d+", ours)[:parts], re.findall(r"\d+", theirs)[:parts], strict=False)
    return all(int(one) == int(other) for one, other in pairs)
