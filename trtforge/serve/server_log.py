"""The server's log: the first thing that went wrong in it, which is the one to read."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

_ENTRY = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?P<where>\S+)\] (?P<said>.*)")
_ERROR = re.compile(r"[EF]\d{4} ")
_OTHER_ERROR = re.compile(r"^(\S*Error\b|error:|Signal \()", re.IGNORECASE)
_NOISE = ("CudaDriverHelper has not been initialized", "Failed to initialize NVML")
_LINES = 6


def first_error(log: Path) -> str:
    """The first error of a log with its continuation lines; empty if there is none."""
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            return "\n".join(islice(_from_first_error(lines), _LINES))
    except OSError:
        return ""


def _from_first_error(lines: Iterable[str]) -> Iterator[str]:
    found = False
    for line in lines:
        text = line.rstrip()
        if any(noise in text for noise in _NOISE):
            continue
        entry = _ENTRY.match(text)
        if not found:
            found = bool(_ERROR.match(text) or (entry is None and _OTHER_ERROR.search(text)))
        elif entry is not None:
            return
        if found and text:
            yield from _unescaped((entry["said"] if entry else text).strip('" '))


def _unescaped(said: str) -> Iterator[str]:
    """Triton writes the lines of one entry as one, with `\\n` between them; where in Python it was is left out."""
    return (line.strip() for line in said.partition("\\n\\nAt:")[0].split("\\n") if line.strip())
