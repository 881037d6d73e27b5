"""Version numbers and what packages require of one another, as far as NVIDIA's and the hub's packages need it."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?(?P<bounds>[^;()]*)\)?\s*(?:;\s*(?P<marker>.*))?$"
)
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<extra>[\w.-]+)['\"]$")
_BOUND = re.compile(r"(?P<sign>>=|<=|==|!=|~=|<|>)\s*(?P<version>[\w.+*-]+)")


@dataclass(frozen=True)
class Requirement:
    """A package and the versions that another one takes; no bounds take every version."""

    name: str
    bounds: str

    def takes(self, version: str) -> bool:
        """Whether `version` lies within the bounds. Pre-releases count as the release that they lead to."""
        return all(_holds(bound["sign"], version, bound["version"]) for bound in _BOUND.finditer(self.bounds))


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.10.0a0+b4e4ee81d3 gives (2, 10, 0), 590.44.01 gives (590, 44, 1)."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


def at_least(version: str, least: str) -> bool:
    """Whether `version` is `least` or later."""
    return _padded(version, least) >= _padded(least, version)


def requirements(lines: Sequence[str], extras: Collection[str] = ()) -> Iterator[Requirement]:
    """A package's requirements with these extras. Those under any other condition are left to pip."""
    for line in lines:
        match = _REQUIREMENT.match(line.strip())
        if match is None:
            continue
        marker = match["marker"]
        extra = _EXTRA.match(marker.strip()) if marker else None
        if marker and (extra is None or extra["extra"] not in extras):
            continue
        yield Requirement(canonical(match["name"]), match["bounds"].strip())


def canonical(name: str) -> str:
    """A package's name as all its spellings have it: nvidia-pytriton."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _holds(sign: str, version: str, bound: str) -> bool:
    if bound.endswith(".*"):
        prefix = numbers(bound)
        return (numbers(version)[: len(prefix)] == prefix) == (sign == "==")
    have, want = _padded(version, bound), _padded(bound, version)
    match sign:
        case ">=":
            return have >= want
        case "<=":
            return have <= want
        case "==":
            return have == want
        case "!=":
            return have != want
        case "<":
            return have < want
        case ">":
            return have > want
        case _:  # ~=: at least this, and equal up to the number before the last
            prefix = numbers(bound)[:-1]
            return have >= want and numbers(version)[: len(prefix)] == prefix


def _padded(version: str, other: str) -> tuple[int, ...]:
    """The numbers with zeros up to the length of the other's: 2.0 and 2.0.0 are equal."""
    own = numbers(version)
    return own + (0,) * (len(numbers(other)) - len(own))
