"""Errors that a user can cause. Any other escaping exception is a bug in trtforge."""

from pathlib import Path


class ForgeError(Exception):
    """A failure with a remedy: `message` says what is wrong and names the file or key, `hint` says what to do."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


class AbsentFile(ForgeError):
    """A file to be read does not exist."""


class UsageError(ForgeError):
    """The command line itself is wrong: exit status 2."""


class RequestError(ForgeError):
    """A generation request that this engine cannot serve; other requests are not affected."""


class LoggedError(ForgeError):
    """Another program failed; `log` has its output. Finished work is kept for the next run."""

    def __init__(self, message: str, *, hint: str, log: Path) -> None:
        super().__init__(message, hint=hint)
        self.log = log

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_logged, (self.message, self.hint, self.log))


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _rebuild(cls: type[ForgeError], message: str, hint: str) -> ForgeError:
    return cls(message, hint=hint)


def _rebuild_logged(message: str, hint: str, log: Path) -> LoggedError:
    return LoggedError(message, hint=hint, log=log)
