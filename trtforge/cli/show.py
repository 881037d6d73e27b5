"""How commands print results: one JSON object, or a table and the next command; messages on stderr.

On a terminal a message is wrapped between words. A word, or a command in backquotes, is never broken: such a line may
be wider than the terminal. Elsewhere a message is one line, so that logs can be searched.
"""

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trtforge.core.figures import counted, listed
from trtforge.core.figures import size as size

if TYPE_CHECKING:
    from trtforge.core.artifact import Produced
    from trtforge.core.errors import ForgeError
    from trtforge.core.manifest import Manifest

_WORDS = re.compile(r"[^\s`]*`[^`\n]+`\S*|\S+")
_CUT = "…"
_JSON_PRINTED: ContextVar[bool] = ContextVar("json_printed", default=False)
_WIDEST_FIGURE = 24


def as_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    import json

    _JSON_PRINTED.set(True)
    print(json.dumps(value, indent=2, sort_keys=False, allow_nan=False))


@contextmanager
def one_json_object() -> Iterator[None]:
    """A run of the program, which prints at most one JSON object: see `error_as_json`."""
    token = _JSON_PRINTED.set(False)
    try:
        yield
    finally:
        _JSON_PRINTED.reset(token)


def error_as_json(error: "ForgeError", hint: str) -> None:
    """Print a failure as the JSON object of this run, unless its result was printed, which tells of the failure too."""
    if not _JSON_PRINTED.get():
        where = [{"file": place.file, "line": place.line, "key": place.key} for place in error.where]
        as_json({"error": error.message, "hint": hint, "where": where or None})


def produced(
    result: "Produced", *, json_output: bool, next_command: str, more: Mapping[str, Any] | None = None
) -> None:
    """Print what a stage produced; `more` is added to the JSON object."""
    manifest = result.manifest
    if json_output:
        as_json(
            {
                "stage": manifest.identity.stage,
                "artifact": str(result.path),
                "bytes": manifest.total_bytes,
                "files": len(manifest.files),
                "cached": result.cached,
                "origin": result.origin,
                "replaced": None if result.replaced is None else result.replaced.digest,
                "digest": manifest.digest,
                "next": next_command,
                **(more or {}),
            }
        )
        return
    verb = "is already right" if result.origin == "already right" else result.origin
    files = counted(len(manifest.files), "file")
    line(f"{manifest.identity.stage} {path(result.path)} {verb}: {files}, {size(manifest.total_bytes)}")
    if result.replaced is not None:
        line(f"replaced: {_earlier(result.replaced, manifest)}")
    print(f"next: {next_command}")


def _earlier(old: "Manifest", new: "Manifest") -> str:
    """A phrase for a replaced artifact: how it differed from the new one."""
    stage = new.identity.stage
    if old.identity == new.identity:
        return f"the same {stage}, which was made again"
    before, after = dict(_leaves(old.identity.config)), dict(_leaves(new.identity.config))
    keys = [key for key in {**after, **before} if before.get(key) != after.get(key)]
    if not keys:
        made = "of other input" if old.identity.inputs != new.identity.inputs else "made by other versions"
        return f"an earlier {stage} with the same settings, {made}"
    shown = [f"{key.rpartition('.')[2]} {_value(before, key)} instead of {_value(after, key)}" for key in keys]
    return f"an earlier {stage} with {listed(shown)}"


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _value(values: Mapping[str, object], key: str) -> str:
    """A setting in a message. Manifests leave some out that have their defaults."""
    import json

    value = values.get(key, "the default")
    return value if isinstance(value, str) and value else json.dumps(value)


def note(text: str) -> None:
    """Print a note on stderr."""
    message("note:", text)


def warning(text: str) -> None:
    """Print a warning on stderr."""
    message("warning:", text)


def line(text: str) -> None:
    """Print a sentence on stdout: wrapped on a terminal, the later lines indented, else as it is."""
    print(wrapped(text, width(sys.stdout), "  ") if sys.stdout.isatty() else text)


def message(label: str, text: str) -> None:
    """Print a message on stderr: wrapped on a terminal, else as it is."""
    line = f"{label} {text}"
    print(wrapped(line, width(sys.stderr)) if sys.stderr.isatty() else line, file=sys.stderr)


def width(stream: TextIO | None = None) -> int:
    """Columns of the terminal; 80 where there is none."""
    import os

    if stream is not None and "COLUMNS" not in os.environ:
        try:
            return os.get_terminal_size(stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80
    return shutil.get_terminal_size().columns


def wrapped(text: str, most: int, indent: str = "") -> str:
    """`text` in lines of at most `most` columns, the later lines after `indent`.

    Words and commands in backquotes stay whole; line breaks in `text` are kept.
    """
    return "\n".join(_wrapped(line, most, indent) for line in text.split("\n"))


def _wrapped(line: str, most: int, indent: str) -> str:
    start = line[: len(line) - len(line.lstrip())]
    lines, current = [], start
    for word in _WORDS.findall(line):
        empty = not current.strip()
        if not empty and len(current) + 1 + len(word) > most:
            lines.append(current)
            current, empty = start + indent, True
        current += word if empty else f" {word}"
    return "\n".join([*lines, current])


def path(place: str | Path, most: int | None = None) -> str:
    """A path relative to the current directory if it is below it, cut in the middle to at most `most` columns."""
    found = Path(place)
    if found.is_absolute() and found.is_relative_to(Path.cwd()):
        found = found.relative_to(Path.cwd())
    return str(found) if most is None else shortened(str(found), most)


def shortened(text: str, most: int) -> str:
    """`text` cut in the middle to at most `most` characters; more is kept of the end, where paths differ."""
    if len(text) <= most:
        return text
    first = (most - 1) // 3
    return f"{text[:first]}{_CUT}{text[len(text) - (most - 1 - first) :]}"


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows as lines of plain columns two spaces apart; the columns numbered in `right` are right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, prose: bool = False) -> None:
    """Print a table on stdout. Columns after the first are right-aligned unless `prose` is set."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # `Text`, because rich takes :words: and [words] in strings for emoji and markup.
    grid = Table(title=Text(title, style="bold"), title_justify="left")
    for number, column in enumerate(columns):
        figures = not prose and number > 0 and all(len(row[number]) <= _WIDEST_FIGURE for row in rows)
        grid.add_column(Text(column), justify="right" if figures else "left", overflow="fold", no_wrap=figures)
    for row in rows:
        grid.add_row(*map(Text, row))
    Console(soft_wrap=False).print(grid)
