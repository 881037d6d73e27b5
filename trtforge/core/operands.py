"""Paths among the words of a command that is printed."""

from pathlib import Path


def operand(path: Path | str) -> str:
    """A path as an argument: one that begins with a hyphen would be an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)
