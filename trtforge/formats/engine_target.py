"""Where an engine runs: the versions and the GPU that it was built with, and how a place to run it differs from them.

TensorRT reads a plan only in exactly the version that wrote it and on the compute capability it was tuned for; the
plugins in it are those of one TensorRT-LLM release. TensorRT-LLM compares no versions when it loads an engine
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
    """What a TensorRT-LLM engine was built with and for, or what a place to run it offers. None: not known."""

    tensorrt_llm: str | None = Field(None, description="TensorRT-LLM release, such as 1.2.1.")
    tensorrt: str | None = Field(None, description="TensorRT's version, all four parts, such as 10.14.1.48.")
    cuda: str | None = Field(None, description="CUDA's version, such as 13.1.")
    sm: str | None = Field(None, pattern=r"^\d+$", description="Compute capability x 10, such as 90.")
    gpu: str | None = Field(None, description="The GPU as the driver names it, such as NVIDIA H100 80GB HBM3.")

    @property
    def versions(self) -> dict[str, str]:
        """What is known, for `Identity.versions` of the engine's manifest: another value is another engine."""
        return {name: str(value) for name, value in self.model_dump(exclude_none=True).items()}

    @classmethod
    def recorded(cls, versions: Mapping[str, str]) -> "EngineTarget | None":
        """The target in the versions of an engine's manifest; None where the engine does not record one."""
        found = {name: versions[name] for name in cls.model_fields if name in versions}
        return cls.parse(found, "forge.json: versions") if found else None


@dataclass(frozen=True)
class TargetEnvironment:
    """Somewhere to run an engine. `sure`: what it offers is seen there, or no source contradicts it."""

    name: str
    offers: EngineTarget
    sure: bool = True

    @classmethod
    def of_container(cls, container: Container) -> "TargetEnvironment":
        """An image, by the release data."""
        offers = EngineTarget(tensorrt_llm=container.tensorrt_llm, tensorrt=container.tensorrt, cuda=container.cuda)
        return cls(f"the image {container.image}", offers, sure=container.confidence == "high")


@dataclass(frozen=True)
class Difference:
    """A field in which a place is not what an engine was built for. `stops`: the engine cannot run there."""

    field: FieldName
    built: str
    found: str
    stops: bool

    def said(self, place: str) -> str:
        """The difference as a sentence about the place of that name."""
        rule = _RULES[self.field]
        return f"the engine was built {rule.built} {rule.label} {self.built}, {place} has {rule.label} {self.found}"


@dataclass(frozen=True)
class _Rule:
    """What a field is called, how an engine comes to have it, and what follows where a place has another value.

    `parts`: how many numbers of a version count; None: the whole value does.
    """

    label: str
    built: str
    consequence: str
    stops: bool
    parts: int | None = None


_RULES: Mapping[FieldName, _Rule] = {
    "tensorrt_llm": _Rule("TensorRT-LLM", "with", "an engine is only good for the release that built it", stops=True),
    "tensorrt": _Rule("TensorRT", "with", "an engine is read by exactly the TensorRT that built it", True, parts=4),
    "sm": _Rule("SM", "for", "an engine runs on the compute capability it was built for", stops=True),
    "cuda": _Rule("CUDA", "with", "it runs, with kernels that were chosen with another CUDA", False, parts=1),
    "gpu": _Rule("GPU", "for", "it runs, with kernels that were the fastest on another GPU", stops=False),
}
"""In the order in which differences are told: what stops an engine first."""


def differences(built: EngineTarget, place: EngineTarget) -> tuple[Difference, ...]:
    """How `place` differs from what an engine was built for, what stops it first. What either does not tell is equal.

    Another GPU of the same compute capability, or another CUDA major version under the same TensorRT, runs the engine,
    though not with the kernels that were the fastest when it was built.
    """
    found = []
    for name, rule in _RULES.items():
        ours, theirs = getattr(built, name), getattr(place, name)
        if ours is not None and theirs is not None and not _same(ours, theirs, rule.parts):
            found.append(Difference(name, ours, theirs, rule.stops))
    return tuple(found)


def require_fit(built: EngineTarget, place: TargetEnvironment) -> tuple[str, ...]:
    """Warnings about running an engine at `place`. Raises ForgeError, naming both values, if it cannot run there."""
    warnings = []
    for difference in differences(built, place.offers):
        said = difference.said(place.name)
        if difference.stops and place.sure:
            raise ForgeError(said, hint=_way_out(built, difference))
        warnings.append(f"{said}: {_RULES[difference.field].consequence}")
    return tuple(warnings)


def unknown_origin(built: EngineTarget) -> str | None:
    """The warning about an engine whose TensorRT or GPU nobody recorded; None where both are known."""
    missing = [_RULES[name].label for name in ("tensorrt", "sm") if getattr(built, name) is None]
    if not missing:
        return None
    said = f"the engine does not record its {' and '.join(missing)}"
    return f"{said}: whether it runs where it is served cannot be checked before the server loads it"


def images_for(built: EngineTarget) -> tuple[str, ...]:
    """The images that carry exactly the TensorRT-LLM and TensorRT of an engine, the newest first."""
    if built.tensorrt_llm is None:
        return ()
    try:
        containers = containers_of(release(built.tensorrt_llm))
    except ForgeError:
        return ()  # a release of which nothing is known
    places = ((container.image, TargetEnvironment.of_container(container).offers) for container in containers)
    return tuple(image for image, offers in places if not any(d.stops for d in differences(built, offers)))


def _way_out(built: EngineTarget, difference: Difference) -> str:
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
    """Versions are compared by the numbers that count and that both tell: packages add build numbers and .post1."""
    if parts is None:
        return ours == theirs
    pairs = zip(re.findall(r"\d+", ours)[:parts], re.findall(r"\d+", theirs)[:parts], strict=False)
    return all(int(one) == int(other) for one, other in pairs)
