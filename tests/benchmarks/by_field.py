"""Several measurements as one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TypeVar

T = TypeVar("T")


def by_field(choose: Callable[[Iterable[float]], float], found: Sequence[T]) -> T:
    """Of each field of equal dataclasses, whose values are numbers, what `choose` makes of them."""
    kind = type(found[0])
    return kind(*(choose(getattr(each, field.name) for each in found) for field in fields(kind)))  # type: ignore[arg-type]
