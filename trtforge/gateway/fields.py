"""Reads and checks the fields of a request's JSON. Errors name the field, as OpenAI's do. null means absent."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.gateway.errors import ApiError, bad_request
from trtforge.gateway.limits import GatewayLimits

INT64 = 1 << 63


class Fields:
    """The object in a request's body. `known`: accepted names, with or without effect.

    `within`: the field of a nested object, followed by a dot; empty for the body.
    """

    def __init__(self, values: Mapping[str, Any], known: Collection[str], within: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._within = within
        for name in self._values:
            if name not in known:
                raise _unknown(name, known, within)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, absent: Any = None) -> Any:
        """The unchecked value; `absent` if it is missing."""
        return self._values.get(name, absent)

    def text(self, name: str) -> str:
        """A required, non-empty string."""
        value = self._values.get(name)
        if value is None:
            raise bad_request(f"you must provide the parameter {self._within}{name}", self._within + name)
        if not isinstance(value, str) or not value:
            raise wrong(self._within + name, "a non-empty string", value)
        return value

    def flag(self, name: str, absent: bool = False) -> bool:
        """A boolean; `absent` if it is missing."""
        value = self._values.get(name, absent)
        if not isinstance(value, bool):
            raise wrong(self._within + name, "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in the range; None if absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(self._within + name, f"a whole number from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number in the range; None if absent."""
        value = self._values.get(name)
        return None if value is None else number_in(self._within + name, value, low, high)

    def object(self, name: str) -> Mapping[str, Any]:
        """An object, empty if absent."""
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise wrong(self._within + name, "an object", value)
        return value


def read_body(body: bytes, limits: GatewayLimits) -> Mapping[str, Any]:
    """The object in a body. Raises ApiError (400)."""
    try:
        document = parse_json(body, "the body", hint="", values=limits.json_values, finite=True)
    except ForgeError as error:
        raise bad_request(error.message) from None
    if not isinstance(document, dict):
        raise bad_request("the body must be a JSON object")
    return document


def count_values(document: object) -> int:
    """The number of values in a JSON document, those of its arrays and objects included."""
    count, waiting = 1, [document]
    while waiting:
        value = waiting.pop()
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(within)
        waiting += [each for each in within if isinstance(each, list | dict)]
    return count


def number_in(name: str, value: object, low: float, high: float) -> float:
    """A finite number in the range. Raises ApiError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise wrong(name, f"a number from {low:g} to {high:g}", value)
    return float(value)


def wrong(name: str, wanted: str, value: object) -> ApiError:
    """The error for a field of another type or out of range. Long values and texts are not shown."""
    return bad_request(f"{name} must be {wanted}, not {_shown(value)}", name)


def _shown(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)[:40]
        case str():
            return "a string" if value else "an empty string"
        case list():
            return f"an array of {len(value)}"
    return "an object"


def _unknown(name: str, known: Collection[str], within: str) -> ApiError:
    nearest = get_close_matches(name[:64], known, n=1, cutoff=0.7)
    meant = f"; did you mean {within}{nearest[0]}?" if nearest else ""
    shown = within + name[:64]
    return bad_request(f"unrecognized request argument supplied: {shown!r}{meant}", shown)
