"""Floor 5: build one model in several number formats, one after another; a failed build does not stop the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.nearest import nearest_format
from trtforge.core.recipe import QuantFormat, Recipe
from trtforge.pipeline.report import BuildReport


@dataclass(frozen=True)
class Variant:
    """A recipe in one format, and its build directory. `named`: the arguments that select it on a command line."""

    format: str
    recipe: Recipe
    out: Path
    named: str = ""


@dataclass(frozen=True)
class Attempt:
    """The build of a variant: its report, or the error that ended it."""

    variant: Variant
    report: BuildReport | None
    error: ForgeError | None = None


def check_formats(formats: Sequence[str]) -> None:
    """Raises UsageError for an unknown or repeated format."""
    known = get_args(QuantFormat)
    for name in formats:
        if name not in known:
            nearest = nearest_format(name, known)
            meant = f"Did you mean {nearest}? " if nearest else ""
            raise UsageError(f"--quant: {name} is not a format", hint=f"{meant}Formats: {', '.join(known)}.")
        if list(formats).count(name) > 1:
            raise UsageError(f"--quant: {name} is given twice", hint="Give each format once.")


def sweep(
    builds: Sequence[Variant], build: Callable[[Variant], BuildReport], ended: Callable[[Attempt], None]
) -> tuple[Attempt, ...]:
    """Build the variants in turn with `build`, one after another, and call `ended` after each. A ForgeError ends only
    its own build."""
    attempts = []
    for variant in builds:
        try:
            attempt = Attempt(variant, build(variant))
        except ForgeError as error:
            attempt = Attempt(variant, None, error)
        ended(attempt)
        attempts.append(attempt)
    return tuple(attempts)
