"""Typed access to keys of a checkpoint's config.json that only some families have.

Absent and null keys give the default.
"""

from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import CheckpointConfig


def number(config: CheckpointConfig, key: str, default: float) -> float:
    """A number. Raises ForgeError if it is something else."""
    value = getattr(config, key, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(key, value, "a number")
    return float(value)


def integer(config: CheckpointConfig, key: str, default: int = 0) -> int:
    """An integer. Raises ForgeError if it is something else."""
    value = number(config, key, default)
    if value != int(value):
        raise _wrong(key, value, "an integer")
    return int(value)


def flag(config: CheckpointConfig, key: str, default: bool = False) -> bool:
    """A boolean. Raises ForgeError if it is something else."""
    value = getattr(config, key, None)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def text(config: CheckpointConfig, key: str) -> str:
    """A string, empty if absent. Raises ForgeError if it is something else."""
    value = getattr(config, key, None)
    if value is not None and not isinstance(value, str):
        raise _wrong(key, value, "text")
    return value or ""


def numbers(config: CheckpointConfig, key: str) -> tuple[float, ...] | None:
    """A list of numbers, None if absent. Raises ForgeError if it is something else."""
    value = getattr(config, key, None)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, int | float) for item in value):
        raise _wrong(key, value, "a list of numbers")
    return tuple(float(item) for item in value)


def _wrong(key: str, value: object, expected: str) -> ForgeError:
    return ForgeError(
        f"config.json: {key} is {value!r}, {expected} is expected", hint="Create the directory again with trtforge."
    )
