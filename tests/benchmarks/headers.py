"""C++ text that every installation has, torch's own headers: a foreign domain for models of prose."""

from pathlib import Path

import torch

_SEPARATOR = "\n\f\n"
_EVERY = 20  # one of so many documents
_MOST_CHARACTERS = 4_000_000


def write_headers(out: Path) -> Path:
    """Write some headers, from every part of torch, into the file `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_SEPARATOR.join(_documents()[::_EVERY]))
    return out


def _documents() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    found, total = [], 0
    for path in sorted(root.rglob("*.h"), key=lambda path: (_mixed(path.name), path.name)):
        text = path.read_text(errors="ignore")
        if len(text) > 2000 and total + len(text) <= _MOST_CHARACTERS:
            found.append(text.replace("\f", "\n"))
            total += len(text)
    return found


def _mixed(name: str) -> int:
    """A number that mixes directories and alphabets, the same in every process."""
    return sum((index + 1) * ord(letter) for index, letter in enumerate(name)) * 2654435761 % 2**32
