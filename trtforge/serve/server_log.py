"""The first error in the server's log, usually the cause of the later ones."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from trtforge.serve.log_limit import emptied

_ENTRY = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?P<where>\S+)\] (?P<said>.*)")
_ERROR = re.compile(r"[EF]\d{4} ")
_OTHER_ERROR = re.compile(r"^(\S*Error\b|error:|Signal \(|terminate called|\[libprotobuf FATAL)", re.IGNORECASE)
_ABORT = re.compile(r"Signal \(|terminate called")
"""Lines that may follow the error of a process that aborts."""
_NOISE = ("CudaDriverHelper has not been initialized", "Failed to initialize NVML")
_SAID = r"hint: (.+(?:\n  .+)*)"  # hints with several parts have indented lines
_HINTS = (re.compile(rf" \({_SAID}\)$", re.MULTILINE), re.compile(rf"\n?^{_SAID}$", re.MULTILINE))
"""Hints in errors raised by the models of a repository, and in those printed by our other programs."""
_LINES = 6
_RECENT = 5.0  # a failure's cause may have been logged up to this many seconds before


class LogMark:
    """A position in a log: errors before it are of single requests, logged while the server was healthy."""

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._next: tuple[float, int] | None = None
        self.offset = 0

    def advance(self, now: float) -> None:
        """Record that the server is healthy at `now` (seconds); the mark follows some seconds later.

        A full log is emptied, as the log of a healthy server is not needed.
        """
        if self._log is None or (self._next is not None and now - self._next[0] < _RECENT):
            return
        if emptied(self._log):
            self._next = (now, 0)
        if self._next is not None:
            self.offset = self._next[1]
        self._next = (now, self._log.stat().st_size if self._log.exists() else 0)


def first_error(log: Path | None, offset: int = 0) -> str:
    """The first error of a log from byte `offset` on, with its continuation lines; empty if there is none."""
    return _read(log, offset, lambda lines: islice(_from_first_error(lines), _LINES))


def without_hint(error: str) -> tuple[str, str]:
    """An error logged by our programs without its hint, and the hint, which may be empty."""
    found = next((match for hint in _HINTS if (match := hint.search(error))), None)
    return (error, "") if found is None else (error[: found.start()] + error[found.end() :], found[1])


def last_lines(log: Path | None, offset: int = 0) -> str:
    """The last lines of a log from byte `offset` on; empty if there is none."""
    return _read(log, offset, lambda lines: deque((text for line in lines if (text := line.rstrip())), maxlen=_LINES))


def _read(log: Path | None, offset: int, choose: Callable[[Iterable[str]], Iterable[str]]) -> str:
    if log is None:
        return ""
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            lines.seek(offset)
            return "\n".join(choose(lines))
    except OSError:
        return ""


def _from_first_error(lines: Iterable[str]) -> Iterator[str]:
    found = logged = False
    for line in lines:
        text = line.rstrip()
        if any(noise in text for noise in _NOISE):
            continue
        entry = _ENTRY.match(text)
        if not found:
            logged = entry is not None
            found = bool(_ERROR.match(text) or (not logged and _OTHER_ERROR.search(text)))
        elif entry is not None or (logged and _ABORT.match(text)):
            return
        if found and text:
            yield from _unescaped((entry["said"] if entry else text).strip('" '))


def _unescaped(said: str) -> Iterator[str]:
    """The lines of one entry, which Triton joins with `\\n`, without the location in Python code."""
    return (line.strip() for line in said.partition("\\n\\nAt:")[0].split("\\n") if line.strip())
