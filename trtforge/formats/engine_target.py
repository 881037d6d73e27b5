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

from trtforge.core.config import Config

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
class Difference:
    """A field in which a place is not what an engine was built for. `stops`: the engine cannot run there."""

    field: FieldName
    built: str
    found: str
    stops: bool

    def said(self, place: str) -> str:
        """The difference as a sentence about `place`."""
        name = _NAMES[self.field]
        return f"the engine was built {_BUILT[self.field]} {name} {self.built}, {place} has {name} {self.found}"


_NAMES: Mapping[FieldName, str] = {
    "tensorrt_llm": "TensorRT-LLM",
    "tensorrt": "TensorRT",
    "cuda": "CUDA",
    "sm": "SM",
    "gpu": "GPU",
}
_BUILT: Mapping[FieldName, str] = {
    "tensorrt_llm": "with",
    "tensorrt": "with",
    "cuda": "with",
    "sm": "for",
    "gpu": "for",
}
_PARTS: Mapping[FieldName, int] = {"tensorrt": 4, "cuda": 1}
"""How many numbers of a version count: all four of TensorRT's, the major one of CUDA's."""


def differences(built: EngineTarget, place: EngineTarget) -> tuple[Difference, ...]:
    """How `place` differs from what an engine was built for, what stops it first. What either does not tell is equal.

    Another GPU of the same compute capability, or another CUDA major version under the same TensorRT, runs the engine,
    though not with the kernels that were the fastest when it was built.
    """
    found = []
    for name in _NAMES:
        ours, theirs = getattr(built, name), getattr(place, name)
        if ours is not None and theirs is not None and not _same(name, ours, theirs):
            found.append(Difference(name, ours, theirs, stops=name in ("tensorrt_llm", "tensorrt", "sm")))
    return tuple(sorted(found, key=lambda difference: not difference.stops))


def _same(name: FieldName, ours: str, theirs: str) -> bool:
    """Versions are compared by the numbers that count and that both tell: packages add build numbers and .post1."""
    parts = _PARTS.get(name)
    if parts is None:
        return ours == theirs
    pairs = zip(re.findall(r"\d+", ours)[:parts], re.findall(r"\d+", theirs)[:parts], strict=False)
    return all(int(one) == int(other) for one, other in pairs)
