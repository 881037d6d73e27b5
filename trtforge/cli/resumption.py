"""Whether an interrupted command goes on from what it finished when it is run again."""

from collections.abc import Iterator
from contextlib import contextmanager

_WHOLE = frozenset(("build", "calibrate", "convert", "compile", "package", "migrate"))
"""Commands that do so wherever they are interrupted."""
_interrupted_parts: list[str] = []
"""Commands that were interrupted within a part that does so."""


def resumes(command: str) -> bool:
    """Whether the interrupted command of this name does so."""
    return command in _WHOLE or command in _interrupted_parts


@contextmanager
def resumable_part(command: str) -> Iterator[None]:
    """The part of a command that does so, such as the build of one that then serves what was built."""
    _interrupted_parts.append(command)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        _interrupted_parts.remove(command)
        raise
    _interrupted_parts.remove(command)
