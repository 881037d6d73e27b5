"""API keys: read from a file, compared in constant time, never shown."""

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from trtforge.core.errors import ForgeError

KEY_VARIABLE = "TRTFORGE_API_KEY"
"""The environment variable with the key that clients send."""

_SHORTEST = 16


class ApiKeys:
    """The keys of one server, as digests."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._digests)})"

    def why_refused(self, headers: Mapping[bytes, bytes]) -> str | None:
        """None if a key is given as `Authorization: Bearer KEY` or `x-api-key: KEY`, else the reason.

        Names of headers are in lower case.
        """
        given = headers.get(b"x-api-key")
        authorization = headers.get(b"authorization", b"")
        if authorization[:7].lower() == b"bearer ":
            given = authorization[7:].strip()
        if given is None:
            return "an API key is required: send the header Authorization: Bearer KEY"
        digest = _digest(given)
        # Compare every key, so that the time does not reveal which one matches.
        if not any([hmac.compare_digest(digest, key) for key in self._digests]):
            return "the API key is not valid"
        return None


def key_header() -> dict[str, str]:
    """The header with the key of this environment; empty without one."""
    key = os.environ.get(KEY_VARIABLE)
    return {"x-api-key": key} if key else {}


def key_needed(url: str) -> ForgeError:
    """The error for a server that refused a request because of its key."""
    if key_header():
        return ForgeError(
            f"the server at {url} does not know the API key in {KEY_VARIABLE}",
            hint=f"Set {KEY_VARIABLE} to a line of the file that the server was given with --api-key-file.",
        )
    return ForgeError(
        f"the server at {url} requires an API key",
        hint=f"Set it with `export {KEY_VARIABLE}=KEY`, and run the same command again.",
    )


def read_key_file(file: Path) -> tuple[str, ...]:
    """The keys in `file`: one per line; empty lines and lines that begin with # are ignored. Raises ForgeError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ForgeError(
            f"the API keys cannot be read: {file} ({reason})",
            hint="Give --api-key-file a text file with one key per line.",
        ) from None
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            raise ForgeError(
                f"{file}, line {number}: a key has at least {_SHORTEST} printable ASCII characters and no space",
                hint="Make one with `openssl rand -hex 32`.",
            )
        keys.append(key)
    if not keys:
        raise ForgeError(f"{file} holds no API key", hint="Write one key per line, made with `openssl rand -hex 32`.")
    return tuple(keys)


def readable_by_others(file: Path) -> bool:
    """Whether users other than the owner can access the file."""
    return bool(stat.S_IMODE(file.stat().st_mode) & 0o077)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
