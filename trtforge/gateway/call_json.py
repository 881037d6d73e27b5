"""Finds calls in a complete JSON text."""

import json
from collections.abc import Sequence
from typing import Any

from trtforge.core.call_forms import ARGUMENTS
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.gateway.tools import ToolUse


def calls_in(use: ToolUse, text: str) -> Sequence[tuple[str, str]]:
    """Names and arguments of the calls in a JSON text: one call or an array of calls; empty for anything else."""
    try:
        values = parse_json(text, "the call", hint="", unique=False)
    except ForgeError:
        return []
    calls = [_call(use, value) for value in (values if isinstance(values, list) else [values])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(use: ToolUse, value: Any) -> tuple[str, str] | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # as in OpenAI's API
    if not isinstance(value, dict) or value.get("name") not in use.names:
        return None
    arguments = next((value[name] for name in ARGUMENTS if isinstance(value.get(name), dict)), None)
    return None if arguments is None else (value["name"], json.dumps(arguments, ensure_ascii=False))
