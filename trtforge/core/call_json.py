"""Finds calls in complete JSON."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from trtforge.core.call_forms import ARGUMENTS, NAMES
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json


def calls_in(names: Collection[str], text: str) -> Sequence[tuple[str, str]]:
    """See `calls_of`, for a JSON text; empty for any other text."""
    try:
        value = parse_json(text, "the call", hint="", unique=False)
    except ForgeError:
        return []
    return calls_of(names, value)


def calls_of(names: Collection[str], value: Any) -> Sequence[tuple[str, str]]:
    """Names and arguments of the calls of functions with these names: one call or an array of calls.

    Empty for anything else.
    """
    calls = [_call(names, each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(names: Collection[str], value: Any) -> tuple[str, str] | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # as in OpenAI's API
    if not isinstance(value, dict):
        return None
    called = next((value[name] for name in NAMES if name in value), None)
    if not isinstance(called, str) or called not in names:
        return None
    arguments = next((value[name] for name in ARGUMENTS if isinstance(value.get(name), dict)), None)
    return None if arguments is None else (called, json.dumps(arguments, ensure_ascii=False))
