"""TensorRT's timings of kernels in the cache: one file for each GPU and version of TensorRT."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.cache_prune import DAY, PruneLimits

_DIRECTORY, _SUFFIX = "timing", ".cache"


@dataclass(frozen=True)
class Timings:
    """The timings of one GPU; `last_used` is in seconds since 1970."""

    path: Path
    bytes: int
    last_used: float

    @property
    def name(self) -> str:
        """Which TensorRT and GPU they are of."""
        return self.path.stem


def timings_path(root: Path, name: str) -> Path:
    """Where the cache below `root` keeps the timings of this name."""
    return root / _DIRECTORY / f"{name}{_SUFFIX}"


def list_timings(root: Path) -> tuple[Timings, ...]:
    """All of them, the last used first."""
    found = []
    for path in sorted((root / _DIRECTORY).glob(f"[!.]*{_SUFFIX}")):
        with suppress(FileNotFoundError):  # another process may prune
            status = path.stat()
            found.append(Timings(path, status.st_size, status.st_mtime))
    return tuple(sorted(found, key=lambda each: -each.last_used))


def sweep_drafts(root: Path, now: float) -> None:
    """Delete what killed builds left half copied a day ago or more. `now`: seconds since 1970."""
    for path in (root / _DIRECTORY).glob(f".*{_SUFFIX}.*"):
        with suppress(FileNotFoundError):
            if now - path.stat().st_mtime > DAY:
                path.unlink()


def unused(timings: Iterable[Timings], limits: PruneLimits, now: float) -> tuple[Timings, ...]:
    """Those that `limits` let go: by age and --all. They are small: what is to fit a size are artifacts."""
    return tuple(each for each in timings if limits.expired(each.last_used, now))
