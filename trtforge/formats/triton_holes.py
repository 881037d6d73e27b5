"""Known vulnerabilities of Triton releases, looked up in `release_data/triton-holes.json`, each with its sources."""

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Literal

from packaging.version import Version

from trtforge.core.config_model import Config
from trtforge.core.json_text import REINSTALL, read_json_object

_FILE = Path(__file__).parent / "release_data" / "triton-holes.json"


class Hole(Config):
    """A vulnerability. `fixed_in`: the first release without it; None: unknown. `door`: the endpoints that it needs."""

    id: str
    cves: tuple[str, ...]
    fixed_in: str | None
    door: str | None = None
    backend: str | None = None
    front: bool
    grpc: bool
    says: str
    confidence: Literal["high", "medium", "low"]
    sources: tuple[str, ...]

    def covered(self, *, front: bool, opened: Collection[str]) -> bool:
        """Whether it is unreachable, because its endpoints are closed, the front blocks it, or its backend is not
        loaded."""
        behind_door = self.door is not None and self.door not in opened
        return behind_door or self.backend is not None or (front and self.front and not self.grpc)

    @property
    def name(self) -> str:
        """Its CVEs, or its id if it has none."""
        return ", ".join(self.cves) or self.id


class _Option(Config):
    option: str
    since: str
    unit: str
    default: int
    sources: tuple[str, ...]


class _File(Config):
    schema_version: int
    subject: str
    how_to_read: str
    sources: dict[str, str]
    confidence: dict[str, str]
    wheels: dict[str, str]
    versions: dict[str, str]
    options: tuple[_Option, ...]
    holes: tuple[Hole, ...]


def holes_of(release: str) -> tuple[Hole, ...]:
    """The vulnerabilities of a Triton release, such as 24.10."""
    return tuple(hole for hole in _data().holes if hole.fixed_in is None or Version(release) < Version(hole.fixed_in))


def open_holes(release: str, *, front: bool, opened: Collection[str]) -> tuple[Hole, ...]:
    """The vulnerabilities that neither the front nor closed endpoints cover."""
    return tuple(hole for hole in holes_of(release) if not hole.covered(front=front, opened=opened))


def hole_warning(release: str, *, front: bool, opened: Collection[str]) -> str | None:
    """A warning about the vulnerabilities of a server that clients can reach; None if there are none."""
    holes = open_holes(release, front=front, opened=opened)
    if not holes:
        return None
    names = ", ".join(hole.name for hole in holes)
    return f"Triton {release} has known vulnerabilities that clients can reach ({names}): keep it on a trusted network"


def has_option(release: str, option: str) -> bool:
    """Whether a release's `tritonserver` has an option that older ones lack."""
    return any(one.option == option and Version(one.since) <= Version(release) for one in _data().options)


def release_of_wheel(version: str | None) -> str | None:
    """The Triton release in a version of nvidia-pytriton."""
    return _data().wheels.get(version or "")


def release_of_server(version: str) -> str | None:
    """The release (24.10) of a server version (2.51.0), or of a release itself."""
    return version if version in _data().versions.values() else _data().versions.get(version)


@cache
def _data() -> _File:
    return _File.parse(read_json_object(_FILE, hint=REINSTALL), str(_FILE))
