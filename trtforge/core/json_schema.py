"""References and types of JSON Schema (2020-12), and the schemas of functions' arguments."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_LONGEST_INDEX = 9
VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def referred(reference: str, root: object) -> object:
    """What a reference within a schema, such as `#/$defs/Place`, stands for (RFC 6901).

    Raises ValueError for one that is not within it, and KeyError with the step that leads nowhere.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(reference)
    found: Any = root
    for step in unquote(reference[2:]).split("/") if reference != "#" else ():
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and len(key) <= _LONGEST_INDEX and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            raise KeyError(key)
    return found


def type_of(value: object) -> str:
    """The narrowest type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = ((float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")


def arguments_schema(parameters: object) -> Mapping[str, Any]:
    """The schema of a function's arguments, by its `parameters`; without them it takes none."""
    return {"type": "object", **parameters} if isinstance(parameters, Mapping) and parameters else _NO_ARGUMENTS
