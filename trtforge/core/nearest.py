"""The path that a mistyped one probably means."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path


def nearest_path(missing: Path, accepts: Callable[[Path], bool]) -> Path | None:
    """The accepted path beside `missing` whose name is most like its name; None if none is alike."""
    try:
        beside = [path.name for path in missing.parent.iterdir() if accepts(path)]
    except OSError:
        return None
    found = get_close_matches(missing.name, beside, n=1, cutoff=0.7)
    return missing.parent / found[0] if found else None


def nearest_directory(missing: Path) -> Path | None:
    """As `nearest_path`, for directories."""
    return nearest_path(missing, Path.is_dir)
