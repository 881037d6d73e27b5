"""How commands print results: one JSON object, or a table and the next command."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtforge.core.artifact import Produced

_UNITS = ("B", "kB", "MB", "GB", "TB")


def as_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    import json

    print(json.dumps(value, indent=2, sort_keys=False))


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
                "digest": manifest.digest,
                "next": next_command,
                **(more or {}),
            }
        )
        return
    verb = "is already right" if result.origin == "already right" else result.origin
    print(f"{manifest.identity.stage} {result.path} {verb}: {len(manifest.files)} files, {size(manifest.total_bytes)}")
    print(f"next: {next_command}")


def note(text: str) -> None:
    """Print a note on stderr."""
    print(f"note: {text}", file=sys.stderr)


def warning(text: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {text}", file=sys.stderr)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, prose: bool = False) -> None:
    """Print a table on stdout. Columns after the first are right-aligned unless `prose` is set."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        grid.add_column(column, justify="left" if prose or number == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    Console(soft_wrap=False).print(grid)


def size(count: int) -> str:
    """Bytes in decimal units with three significant digits: 4.07 MB."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if value < 1000 else f"{value:.0f} {_UNITS[unit]}"
