"""TensorRT's timing caches: one file per GPU and TensorRT version, in trtforge's cache."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.cache_prune import DAY, PruneLimits

_DIRECTORY, _SUFFIX = "timing", ".cache"


@dataclass(frozen=True)
class Timings:
    """The timing cache of one GPU; `last_used` is in seconds since 1970."""

    path: Path
    bytes: int
    last_used: float

    @property
    def name(self) -> str:
        """TensorRT version and GPU."""
        return self.path.stem


def timings_path(root: Path, name: str) -> Path:
    """The file of this timing cache in the cache below `root`."""
    return root / _DIRECTORY / f"{name}{_SUFFIX}"


def list_timings(root: Path) -> tuple[Timings, ...]:
    """All timing caches, the most recently used first."""
    found = []
    for path in sorted((root / _DIRECTORY).glob(f"[!.]*{_SUFFIX}")):
        with suppress(FileNotFoundError):  # another process may prune it
            status = path.stat()
            found.append(Timings(path, status.st_size, status.st_mtime))
    return tuple(sorted(found, key=lambda each: -each.last_used))


def sweep_drafts(root: Path, now: float) -> None:
    """Delete unfinished copies of killed builds that are older than a day. `now`: seconds since 1970."""
    for path in (root / _DIRECTORY).glob(f".*{_SUFFIX}.*"):
        with suppress(FileNotFoundError):
            if now - path.stat().st_mtime > DAY:
                path.unlink()


def unused(timings: Iterable[Timings], limits: PruneLimits, now: float) -> tuple[Timings, ...]:
    """The timing caches that `limits` remove, by age or --all. max_size does not apply, as they are small."""
    return tuple(each for each in timings if limits.expired(each.last_used, now))
