"""The values of a request's tensors, checked. Every error names the input, its value and the allowed values."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from responder import RequestFailed

_SHOWN = 80
INT32_MAX = 2**31 - 1
_MOST_SEQUENCES = 128


def most_sequences(max_batch_size: int) -> int:
    """Sequences of one request at most: those that find no place in the engine's batch wait."""
    return max(max_batch_size, _MOST_SEQUENCES)


def first_integer(inputs: Mapping[str, NDArray[Any]], name: str, default: int) -> int:
    """The first value of an input; `default` if it is absent or empty."""
    return int(inputs[name].flat[0]) if name in inputs and inputs[name].size else default


class InputValues:
    """A request's tensors. `names`: input names to show in errors, where they differ."""

    def __init__(self, inputs: Mapping[str, NDArray[Any]], names: Mapping[str, str] | None = None) -> None:
        self._inputs = inputs
        self._names = names or {}

    def __contains__(self, name: str) -> bool:
        return name in self._inputs and self._inputs[name].size > 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def array(self, name: str) -> NDArray[Any]:
        """A whole input. Raises RequestFailed if it is missing or empty."""
        if name not in self:
            raise RequestFailed(f"{self.shown(name)} is missing")
        return self._inputs[name]

    def of_item(self, name: str, item: int) -> NDArray[Any]:
        """An input's values of one prompt. Raises RequestFailed if it has too few."""
        value = self.array(name)
        if item >= len(value):
            raise RequestFailed(f"{self.shown(name)} has {len(value)} values for at least {item + 1} prompts")
        return np.asarray(value[item])

    def shown(self, name: str) -> str:
        """The client's name of an input."""
        return self._names.get(name, name)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean, the same for all prompts of the request. Raises RequestFailed if it is not."""
        if name not in self:
            return default
        values = self._inputs[name].astype(bool)
        if values.any() != values.all():
            raise RequestFailed(f"{self.shown(name)} is true for some prompts only; send the others in another request")
        return bool(values.all())

    def integer(self, name: str, item: int, default: int | None, low: int, high: int) -> int:
        """A whole number from `low` to `high`; `default` if the input is absent. None: the input is required."""
        if name not in self and default is not None:
            return default
        value = int(self.of_item(name, item).flat[0])
        if not low <= value <= high:
            raise self.refused(name, value, f"a whole number from {low} to {high}")
        return value

    def integers(self, name: str, item: int) -> list[int]:
        """The whole numbers of one prompt; none if the input is absent."""
        if name not in self:
            return []
        return [int(value) for value in self.of_item(name, item).flat]

    def number(
        self, name: str, item: int, default: float | None, low: float = -math.inf, *, above: bool = False
    ) -> float | None:
        """A finite number of at least `low` (`above`: greater); `default` if the input is absent."""
        if name not in self:
            return default
        value = float(self.of_item(name, item).flat[0])
        if not math.isfinite(value) or value < low or (above and value == low):
            bound = "" if low == -math.inf else f", {'greater than' if above else 'at least'} {low:g}"
            raise self.refused(name, value, f"a finite number{bound}")
        return value

    def share(self, name: str, item: int, default: float | None) -> float | None:
        """A number from 0 to 1; `default` if the input is absent."""
        value = self.number(name, item, default, 0.0)
        if value is not None and value > 1:
            raise self.refused(name, value, "from 0 to 1")
        return value

    def finite(self, name: str) -> None:
        """Raises RequestFailed if an input has a value that is not a finite number."""
        array = self.array(name)
        if not np.isfinite(array).all():
            raise self.refused(name, array[~np.isfinite(array)].flat[0], "a finite number")

    def texts(self, name: str, most: int) -> list[str]:
        """The strings of an input, at most `most`; empty if it is absent. Raises RequestFailed, also for bad UTF-8."""
        if name not in self:
            return []
        value = self._inputs[name]
        if value.size > most:
            raise self.refused(name, f"{value.size} strings", f"at most {most}")
        return [self._decoded(name, text) for text in value.flat]

    def text(self, name: str, item: int) -> str:
        """The string of one prompt; empty if the input is absent. Raises RequestFailed for bad UTF-8."""
        if name not in self:
            return ""
        own = self.of_item(name, item)
        return self._decoded(name, own.flat[0]) if own.size else ""

    def refused(self, name: str, value: object, allowed: str) -> RequestFailed:
        """The error for a value out of range."""
        text = str(value)
        return RequestFailed(
            f"{self.shown(name)} is {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}; it must be {allowed}"
        )

    def _decoded(self, name: str, text: object) -> str:
        try:
            return text.decode() if isinstance(text, bytes) else str(text)
        except UnicodeDecodeError as error:
            raise RequestFailed(f"{self.shown(name)} is not UTF-8: byte {error.start} of {len(error.object)}") from None
