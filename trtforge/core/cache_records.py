"""Small records in the user's cache: what was found out once, by kind and key. Without a usable cache there is none."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from trtforge.core.cache import cache_directory
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object

Kind = Literal["verified", "samples"]
"""`verified`: files of an artifact with their digests checked; `samples`: what calibration data becomes in tokens."""


def read_cached(kind: Kind, key: str) -> dict[str, Any] | None:
    """The record, which counts as used now; None if it is missing or damaged."""
    path = _path(kind, key)
    if path is None:
        return None
    try:
        found = read_json_object(path, hint="")
    except ForgeError:
        return None
    with suppress(OSError):
        os.utime(path)
    return found


def keep_cached(kind: Kind, key: str, text: str) -> None:
    """Write a record, a JSON object, whole. Raises OSError."""
    path = _path(kind, key)
    if path is None:
        return
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def prune_cached(root: Path, expired: Callable[[float], bool]) -> None:
    """Delete the records of the cache `root` whose last use, in seconds since 1970, is `expired`."""
    for path in (each for kind in get_args(Kind) for each in (root / kind).glob("*")):
        with suppress(OSError):
            if expired(path.stat().st_mtime):
                path.unlink()


def _path(kind: Kind, key: str) -> Path | None:
    root = cache_directory()
    return None if root is None else root / kind / f"{key}.json"
