"""Small records of earlier results in the user's cache, by kind and key; none without a usable cache."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar, get_args

from trtforge.core.cache import cache_directory
from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.core.replace import replace_text

Kind = Literal["verified", "samples"]
"""`verified`: files of an artifact with their digests checked; `samples`: facts of tokenised calibration data."""
Record = TypeVar("Record", bound=Config)


def read_cached(kind: Kind, key: str, record: type[Record]) -> Record | None:
    """The record, marked as used now; None if it is missing or invalid."""
    path = _path(kind, key)
    if path is None:
        return None
    try:
        found = record.parse(read_json_object(path, hint=""), str(path))
    except ForgeError:
        return None
    with suppress(OSError):
        os.utime(path)
    return found


def keep_cached(kind: Kind, key: str, record: Config) -> None:
    """Write a record atomically, as other processes may write it too. Raises OSError."""
    path = _path(kind, key)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, record.model_dump_json(), draft=path.with_suffix(f".{os.getpid()}"))


def prune_cached(root: Path, expired: Callable[[float], bool]) -> None:
    """Delete the records of the cache `root` whose last use, in seconds since 1970, is `expired`."""
    for path in (each for kind in get_args(Kind) for each in (root / kind).glob("*")):
        with suppress(OSError):
            if expired(path.stat().st_mtime):
                path.unlink()


def _path(kind: Kind, key: str) -> Path | None:
    root = cache_directory()
    return None if root is None else root / kind / f"{key}.json"
