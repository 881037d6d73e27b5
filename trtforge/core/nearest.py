"""Finds the name, path or format that a mistyped one probably means."""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path

from trtforge.core.errors import ForgeError, mistyped

_ALIKE = 0.7  # similarity from which a name is proposed (difflib's ratio)
_PART = 4  # least letters of a prefix or suffix that identifies a name

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
"""Other names of formats."""


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """The known name closest to a mistyped `name`, or the only one of which it is a prefix or suffix, or which is its
    prefix.

    Leading dashes of options are ignored.
    """
    plain = {each.lstrip("-").lower(): each for each in sorted(known)}
    wrong = name.lstrip("-").lower()
    alike = get_close_matches(wrong, plain, n=1, cutoff=_ALIKE)
    if not alike and len(wrong) >= _PART:
        long = [each for each in plain if len(each) >= _PART]
        parts = [each for each in long if each.startswith(wrong) or each.endswith(wrong) or wrong.startswith(each)]
        alike = parts if len(parts) == 1 else []
    return plain[alike[0]] if alike else None


def nearest_format(name: str, known: Collection[str]) -> str | None:
    """The known format that `name` probably means, if any."""
    other = _OTHER_NAMES.get(name.lower())
    return other if other in known else next(iter(get_close_matches(name, known, n=1, cutoff=0.4)), None)


def nearest_path(missing: Path, accepts: Callable[[Path], bool]) -> Path | None:
    """The accepted path beside `missing` with the most similar name; None if none is similar."""
    try:
        beside = [path.name for path in missing.parent.iterdir() if accepts(path)]
    except OSError:
        return None
    found = get_close_matches(missing.name, beside, n=1, cutoff=_ALIKE)
    return missing.parent / found[0] if found else None


def nearest_directory(missing: Path) -> Path | None:
    """Like `nearest_path`, for directories."""
    return nearest_path(missing, Path.is_dir)


def no_directory(path: Path, *, otherwise: str) -> ForgeError:
    """The error for a path that is not a directory; the hint is `otherwise` if no other path is meant."""
    if path.exists():
        return ForgeError(f"{path} is not a directory", hint=otherwise)
    return mistyped(f"{path}: no such directory", str(path), nearest_directory(path), otherwise=otherwise)
