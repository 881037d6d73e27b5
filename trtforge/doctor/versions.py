"""Version numbers and requirements of NVIDIA's and the hub's packages, by the rules of `packaging` (PEP 440, PEP 508).

A pre-release counts as its final release, because NVIDIA's containers have builds such as torch 2.10.0a0+b4e4ee8.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as PackagingRequirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

_LEADING_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True)
class Requirement:
    """A required package and its accepted versions; empty bounds accept every version."""

    name: str
    bounds: str

    def takes(self, version: str) -> bool:
        """Whether `version` lies within the bounds."""
        return SpecifierSet(self.bounds).contains(_release(version), prereleases=True)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.10.0a0+b4e4ee81d3 gives (2, 10, 0), 590.44.01 gives (590, 44, 1)."""
    leading = _LEADING_NUMBERS.match(version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


def at_least(version: str, least: str) -> bool:
    """Whether `version` is `least` or later."""
    return _release(version) >= _release(least)


def requirements(lines: Sequence[str], extras: Collection[str] = ()) -> Iterator[Requirement]:
    """The requirements of a package with these extras that apply to this interpreter and platform."""
    for line in lines:
        try:
            requirement = PackagingRequirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield Requirement(canonicalize_name(requirement.name), str(requirement.specifier))


def _release(version: str) -> Version:
    """The version without pre-release, post-release and local parts; 0 if it has no numbers."""
    return Version(".".join(map(str, numbers(version))) or "0")
