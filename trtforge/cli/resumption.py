"""Whether an interrupted command keeps finished work, with which it continues when it is run again."""

from collections.abc import Iterator
from contextlib import contextmanager

_WHOLE = frozenset(("build", "calibrate", "convert", "compile", "package", "migrate"))
"""Commands that keep it wherever they are interrupted."""
_interrupted_parts: list[str] = []
"""Commands that run, or were interrupted within, a `resumable_part`."""


def resumes(command: str) -> bool:
    """Whether the interrupted command of this name keeps finished work."""
    return command in _WHOLE or command in _interrupted_parts


@contextmanager
def resumable_part(command: str) -> Iterator[None]:
    """A part of a command that keeps finished work, such as the build of a command that then serves it."""
    _interrupted_parts.append(command)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        _interrupted_parts.remove(command)
        raise
    _interrupted_parts.remove(command)
