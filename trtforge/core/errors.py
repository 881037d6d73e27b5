"""Errors that a user can cause. Any other escaping exception is a bug in trtforge."""

import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# typing_extensions is not installed where models of a repository import this module.
_Error = TypeVar("_Error", bound="ForgeError")


@dataclass(frozen=True)
class Where:
    """The place of a mistake in a file of the user's. `line` counts from 1; `key`: the dotted key."""

    file: str
    line: int | None = None
    key: str | None = None


@dataclass(frozen=True)
class Repair:
    """The correction of a command line: the word `right` instead of `wrong`, and options to set to these values."""

    wrong: str = ""
    right: str = ""
    options: tuple[tuple[str, str], ...] = ()


class ForgeError(Exception):
    """A failure with a remedy: `message` says what is wrong and names the file or key, `hint` says what to do.

    `where`: the places of the mistakes, for programs. `repair`: the command line that would work, if it is known.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where: tuple[Where, ...] = ()
        self.repair: Repair | None = None

    def at(self: _Error, *where: Where) -> _Error:
        """This error with the places of the mistakes."""
        self.where = where
        return self

    def repaired_by(self: _Error, repair: Repair | None) -> _Error:
        """This error with what makes the command line right."""
        self.repair = repair
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.where, self.repair))


class AbsentFile(ForgeError):
    """A file to be read does not exist."""


def mistyped(message: str, wrong: str, meant: object | None, *, otherwise: str) -> ForgeError:
    """The error for `wrong`, which probably means `meant`; the hint is `otherwise` if nothing is known to be meant."""
    if meant is None:
        return ForgeError(message, hint=otherwise)
    return ForgeError(message, hint=f"Did you mean {meant}?").repaired_by(Repair(wrong, str(meant)))


class UsageError(ForgeError):
    """The command line itself is wrong: exit status 2."""


class RequestError(ForgeError):
    """A generation request that this engine cannot serve; other requests are not affected."""


class BusyError(RequestError):
    """As RequestError, of a request that this engine can serve later."""


class UnclearError(RequestError):
    """As RequestError, of a request that failed for a reason that may be the engine's."""


class LoggedError(ForgeError):
    """Another program failed; `log` has its output. Finished work is kept for the next run."""

    def __init__(self, message: str, *, hint: str, log: Path) -> None:
        super().__init__(message, hint=hint)
        self.log = log

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_logged, (self.message, self.hint, self.log))


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if it has none, or one that cannot be read."""
    text = ""
    with suppress(Exception):
        text = str(error)
    return (text.splitlines() or [type(error).__name__])[0]


def killed(program: str, status: int) -> ForgeError | None:
    """The error for a program that SIGKILL ended; None for another exit status, as `subprocess` gives it."""
    if status != -signal.SIGKILL:
        return None
    return ForgeError(
        f"{program} was killed, probably because memory ran out",
        hint="Give it more memory (the limit of the container), or serve less: a smaller format, batch or KV cache.",
    )


def ending(status: int) -> str:
    """How a program ended, of its exit status as `subprocess` gives it: "exit status 3", "signal 15 (SIGTERM)"."""
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return f"signal {-status} ({signal.Signals(-status).name})"
    return f"signal {-status}"


def _rebuild(
    cls: type[ForgeError], message: str, hint: str, where: tuple[Where, ...], repair: Repair | None
) -> ForgeError:
    return cls(message, hint=hint).at(*where).repaired_by(repair)


def _rebuild_logged(message: str, hint: str, log: Path) -> LoggedError:
    return LoggedError(message, hint=hint, log=log)
