"""The path or format that a mistyped one probably means."""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path

_OTHER_NAMES = {
    "awq": "int4_awq",
    "gptq": "int4_awq",
    "int4": "int4_awq",
    "w4a16": "int4_awq",
    "w4a8": "w4a8_awq",
    "int8": "int8_wo",
    "w8a16": "int8_wo",
    "smoothquant": "int8_sq",
    "w8a8": "int8_sq",
    "fp4": "nvfp4",
    "bf16": "none",
    "bfloat16": "none",
    "fp16": "none",
    "float16": "none",
}
"""What formats are called elsewhere."""


def nearest_format(name: str, known: Collection[str]) -> str | None:
    """The known format that `name` probably means, if any."""
    other = _OTHER_NAMES.get(name.lower())
    return other if other in known else next(iter(get_close_matches(name, known, n=1, cutoff=0.4)), None)


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
