"""Triton's endpoints that change the server or tell about it: closed unless opened by name."""

import secrets
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Literal, get_args

from trtforge.core.errors import UsageError

Door = Literal["shared-memory", "model-repository", "model-config", "statistics", "trace", "logging"]
"""The names that Triton's `--http-restricted-api` and `--grpc-restricted-protocol` give them."""

DOORS: tuple[Door, ...] = get_args(Door)
_HEADER = "trtforge-door"


def parse_doors(names: Iterable[str]) -> tuple[Door, ...]:
    """The doors of `--open`, each value one name or several with commas between. Raises UsageError for others."""
    wanted = {name.strip() for some in names for name in some.split(",")} - {""}
    for name in sorted(wanted.difference(DOORS)):
        nearest = get_close_matches(name, DOORS, n=1, cutoff=0.5)
        did_you_mean = f"Did you mean {nearest[0]}? " if nearest else ""
        raise UsageError(f"--open: there is nothing called {name!r}", hint=f"{did_you_mean}Names: {', '.join(DOORS)}.")
    return tuple(door for door in DOORS if door in wanted)


def new_secret() -> str:
    """What would open the closed doors of one server. Nobody is told: Triton only has no way to refuse outright."""
    return secrets.token_urlsafe(32)


def closed(opened: Collection[str]) -> tuple[Door, ...]:
    """The doors that stay closed."""
    return tuple(door for door in DOORS if door not in opened)


def door_arguments(opened: Collection[str], secret: str, *, http: bool) -> tuple[str, ...]:
    """Triton's options that close doors over gRPC and, with `http`, over its own HTTP.

    Triton takes the value on its command line only, so whoever may list this machine's processes can read it.
    """
    names = ",".join(closed(opened))
    if not names:
        return ()
    restriction = f"{names}:{_HEADER}={secret}"
    return (
        f"--grpc-restricted-protocol={restriction}",
        *((f"--http-restricted-api={restriction}",) if http else ()),
    )
