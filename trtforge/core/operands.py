"""Paths as arguments of a printed command."""

from pathlib import Path


def operand(path: Path | str) -> str:
    """A path as an argument; a leading hyphen, which would make it an option, is prefixed."""
    return f"./{path}" if str(path).startswith("-") else str(path)
