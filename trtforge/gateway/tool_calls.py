"""Calls of functions in an answer's text: the array or the arguments of a guided answer, or a model's own form.

A model that may call writes its calls as its chat template teaches it: `<tool_call>{...}</tool_call>` (Hermes, Qwen),
or an answer that is nothing but JSON, `{"name": ..., "parameters": {...}}` (Llama 3.1).
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.core.stop_text import overlap
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tools import ToolUse

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(f"{_OPEN}([^\0]*?)(?:{_CLOSE}|$)")
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments`: JSON, as far as the answer came."""

    name: str
    arguments: str

    def as_json(self) -> Mapping[str, object]:
        """OpenAI's form, with an id of its own."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{os.urandom(12).hex()}", "type": "function", "function": function}


def split(use: ToolUse, text: str) -> tuple[str, Sequence[ToolCall]]:
    """The text of an answer without its calls, and the calls. What looks like a call and is none stays in the text."""
    if use.mode == "named":
        return "", [ToolCall(use.names[0], text)]
    calls: list[ToolCall] = []
    if use.mode == "auto" and _OPEN in text:
        parts, end = [], 0
        for found in _TAGGED.finditer(text):
            if own := _calls(use, found[1]):
                calls += own
                parts.append(text[end : found.start()])
                end = found.end()
        rest = "".join(part for part in (*parts, text[end:]) if part.strip()).rstrip()
    else:
        calls, rest = _calls(use, text), ""
    if not calls:
        return text, ()
    return rest, calls if use.several else calls[:1]


def reason_of(use: ToolUse, reason: str, calls: Sequence[ToolCall]) -> str:
    """The finish reason of an answer with these calls: OpenAI's API has `stop` for a function that was named."""
    return "tool_calls" if calls and reason == "stop" and use.mode != "named" else reason


class HeldCalls:
    """The stream of one choice: text that may be part of a call is held until the choice ends."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._sent = ""
        self._held = ""

    def take(self, delta: Delta) -> tuple[Delta, Sequence[ToolCall]]:
        """A delta with the text that can be sent, and the calls with the last delta."""
        self._held += delta.text
        if delta.finish_reason is not None:
            text, calls = split(self._use, self._sent + self._held)
            reason = reason_of(self._use, delta.finish_reason, calls)
            return replace(delta, text=text[len(self._sent) :], finish_reason=reason), calls
        free = self._free()
        text, self._held = self._held[:free], self._held[free:]
        self._sent += text
        return replace(delta, text=text), ()

    def _free(self) -> int:
        """How many of the held characters can be no part of a call, nor white space before one, which is left out."""
        if self._use.mode != "auto" or (not self._sent and self._held.lstrip()[:1] in ("", "{", "[")):
            return 0
        start = self._held.find(_OPEN)
        return len(self._held[: start if start >= 0 else len(self._held) - overlap(self._held, _OPEN)].rstrip())


def _calls(use: ToolUse, text: str) -> list[ToolCall]:
    """The calls in a JSON text: one, or an array of them; none if it is anything else."""
    try:
        values = parse_json(text, "the call", hint="", unique=False)
    except ForgeError:
        return []
    calls = [_call(use, value) for value in (values if isinstance(values, list) else [values])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(use: ToolUse, value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or value.get("name") not in use.names:
        return None
    arguments = next((value[name] for name in _ARGUMENTS if isinstance(value.get(name), dict)), None)
    if arguments is None:
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
