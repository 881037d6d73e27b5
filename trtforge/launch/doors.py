"""Doors: Triton's endpoint groups that change or reveal the server's state; closed unless opened by name."""

import secrets
from collections.abc import Collection, Iterable
from typing import Literal, get_args

from trtforge.core.errors import UsageError
from trtforge.core.nearest import nearest_name

Door = Literal["shared-memory", "model-repository", "model-config", "statistics", "trace", "logging"]
"""Their names in Triton's `--http-restricted-api` and `--grpc-restricted-protocol`."""

DOORS: tuple[Door, ...] = get_args(Door)
_HEADER = "trtforge-door"


def parse_doors(names: Iterable[str]) -> tuple[Door, ...]:
    """The doors of `--open`, whose values are comma-separated names. Raises UsageError for an unknown name."""
    wanted = {name.strip() for some in names for name in some.split(",")} - {""}
    for name in sorted(wanted.difference(DOORS)):
        nearest = nearest_name(name, DOORS)
        did_you_mean = f"Did you mean {nearest}? " if nearest else ""
        raise UsageError(f"--open: unknown endpoint group {name!r}", hint=f"{did_you_mean}Names: {', '.join(DOORS)}.")
    return tuple(door for door in DOORS if door in wanted)


def new_secret() -> str:
    """The header value that opens one server's closed doors; it is kept secret, because Triton cannot disable the
    endpoints."""
    return secrets.token_urlsafe(32)


def closed(opened: Collection[str]) -> tuple[Door, ...]:
    """The doors that stay closed."""
    return tuple(door for door in DOORS if door not in opened)


def door_arguments(opened: Collection[str], secret: str, *, http: bool) -> tuple[str, ...]:
    """Triton's options that close doors over gRPC and, with `http`, over its own HTTP.

    Triton accepts the value only on its command line, so all who can list this machine's processes can read it.
    """
    names = ",".join(closed(opened))
    if not names:
        return ()
    restriction = f"{names}:{_HEADER}={secret}"
    return (
        f"--grpc-restricted-protocol={restriction}",
        *((f"--http-restricted-api={restriction}",) if http else ()),
    )
