"""Finds calls in complete JSON."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from trtforge.core.call_forms import ARGUMENTS, NAMES
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json

_BETWEEN = re.compile(r"\s*;?\s*")
_WITHOUT_ARGUMENTS = frozenset({*NAMES, *ARGUMENTS, "id", "tool_call_id", "type"})
"""Keys of a call that may have no arguments: the value of another key could be its arguments, wrongly named."""


def calls_in(names: Collection[str], text: str, *, tagged: bool = False) -> Sequence[tuple[str, str]]:
    """See `calls_of`, for a JSON text; empty for any other text. Between tags, it may be several objects."""
    try:
        return calls_of(names, _value(text), tagged=tagged)
    except ForgeError:
        pass
    try:
        return calls_of(names, list(_objects(text)), tagged=True) if tagged else []
    except (ForgeError, ValueError, RecursionError):
        return []


def calls_of(names: Collection[str], value: Any, *, tagged: bool = False) -> Sequence[tuple[str, str]]:
    """Names and arguments of the calls of functions with these names: one call or an array of calls.

    Empty for anything else. `tagged`: the value is between tags of calls, so that a call may have no arguments.
    """
    calls = [_call(names, each, tagged=tagged) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if all(calls) else []


def _value(text: str) -> Any:
    return parse_json(text, "the call", hint="", unique=False)


def value_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins in a text of a model or a template, and where it ends.

    Raises ValueError or RecursionError.
    """
    return json.JSONDecoder().raw_decode(text, at)


def _objects(text: str) -> Iterator[Any]:
    """The objects of a text that stand one after another. Raises ForgeError, ValueError or RecursionError."""
    at = 0
    while (at := _end_of_blank(text, at)) < len(text):
        if text[at] != "{":
            raise ValueError(text[at])
        _, end = value_at(text, at)
        yield _value(text[at:end])
        at = end


def _end_of_blank(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def _call(names: Collection[str], value: Any, *, tagged: bool) -> tuple[str, str] | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # as in OpenAI's API
    if not isinstance(value, dict):
        return None
    called = next((value[name] for name in NAMES if name in value), None)
    if not isinstance(called, str) or called not in names:
        return None
    written = [value.get(name) for name in ARGUMENTS]
    arguments = next((found for each in written if (found := _object_in(each)) is not None), None)
    is_empty = value.keys() <= _WITHOUT_ARGUMENTS and all(each is None or each == "" for each in written)
    if arguments is None and tagged and is_empty:
        arguments = {}
    return None if arguments is None else (called, json.dumps(arguments, ensure_ascii=False))


def _object_in(written: Any) -> Any:
    """The arguments: an object, or the text of one; None for anything else."""
    if isinstance(written, str):
        try:
            written = _value(written)
        except ForgeError:
            return None
    return written if isinstance(written, dict) else None
