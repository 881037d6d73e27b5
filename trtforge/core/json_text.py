"""The only JSON reader: all sizes are limited, and errors name the file and, if known, the line.

Python's own parser has no limits: deep nesting ends in a RecursionError, long numbers in a ValueError.
"""

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.reading import MIB, as_text, read_limited

MOST_BYTES = 64 * MIB
"""The largest tokenizer.json files have 35 MB."""
MOST_VALUES = 5_000_000
"""A value takes 50 to 100 bytes of memory. Gemma 3's tokenizer.json has 2 million."""
DEEPEST = 64
MOST_DIGITS = 40
"""Integers in such files have 64 bits."""

REINSTALL = "Install trtforge again."
"""Hint for a damaged file of the installation."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path, *, hint: str, absent: str | None = None, unique: bool = True) -> Any:
    """The value in a JSON file.

    `hint` is for a damaged file, `absent` for one that is missing. `unique`: a repeated key is an error. Raises
    AbsentFile or ForgeError.
    """
    data = read_limited(path, MOST_BYTES, hint=hint, absent=absent)
    return parse_json(data, str(path), hint=hint, unique=unique)


def read_json_object(path: Path, *, hint: str, absent: str | None = None, unique: bool = True) -> dict[str, Any]:
    """As `read_json`, for a file that must hold an object."""
    values = read_json(path, hint=hint, absent=absent, unique=unique)
    if not isinstance(values, dict):
        raise ForgeError(f"{path}: not a JSON object", hint=hint)
    return values


def parse_json(
    data: bytes | str,
    where: str,
    *,
    hint: str,
    unique: bool = True,
    halves: bool = False,
    values: int = MOST_VALUES,
    finite: bool = False,
) -> Any:
    """The value of a JSON text. Raises ForgeError naming `where`.

    `halves`: allow lone surrogates in strings, which UTF-8 cannot encode. `values`: limit of the number of values.
    `finite`: refuse what would become infinite or NaN and so could not be written as JSON again.
    """
    text = as_text(data, where, hint=hint) if isinstance(data, bytes) else data
    opened = text.count("[") + text.count("{")
    if opened + text.count(",") > values:
        raise ForgeError(f"{where}: more than {values:,} values", hint=hint)
    pairs = partial(_unique, where=where, hint=hint) if unique else None
    number = partial(_finite, where, hint) if finite else None
    try:
        found = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_int=partial(_integer, text, where, hint),
            parse_float=number,
            parse_constant=number,
        )
    except json.JSONDecodeError as error:
        said = f"{error.msg} (line {error.lineno}, column {error.colno})"
        raise ForgeError(f"{where}: not JSON: {said}", hint=hint) from None
    except RecursionError:
        raise _too_deep(where, hint) from None
    if opened > DEEPEST:
        _require_shallow(found, where, hint)
    if not halves and _HALF.search(text):
        _require_whole(found, where, hint)
    return found


def _unique(pairs: Sequence[tuple[str, Any]], where: str, hint: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ForgeError(f"{where}: the key {again!r} occurs twice in one object", hint=hint)
    return found


def _integer(text: str, where: str, hint: str, digits: str) -> int:
    count = len(digits.removeprefix("-"))
    if count > MOST_DIGITS:
        line = text.count("\n", 0, max(0, text.find(digits))) + 1
        said = f"line {line}: an integer of {count:,} digits ({digits[:8]}...), the limit is {MOST_DIGITS}"
        raise ForgeError(f"{where}, {said}", hint=hint)
    return int(digits)


def _finite(where: str, hint: str, text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ForgeError(f"{where}: {text[:20]} is not a finite number", hint=hint)
    return number


def _require_shallow(found: Any, where: str, hint: str) -> None:
    level = [found]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep(where, hint)


def _too_deep(where: str, hint: str) -> ForgeError:
    return ForgeError(f"{where}: nested more than {DEEPEST} deep", hint=hint)


def _require_whole(found: Any, where: str, hint: str) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ForgeError(f"{where}: a lone surrogate ({half!r}) in a string", hint=hint) from None
