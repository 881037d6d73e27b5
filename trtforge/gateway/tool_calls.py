"""Function calls in an answer's text: the array or the arguments of a guided answer, or the model's own format."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.sequence import Delta
from trtforge.gateway.thought_calls import AnswerCalls
from trtforge.gateway.tools import ToolUse


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments`: JSON text by the model; `complete`: the answer was not cut within it."""

    name: str
    arguments: str
    complete: bool = True

    def as_json(self) -> Mapping[str, object]:
        """OpenAI's format, with a new id."""
        return {"id": new_call_id(), "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def new_call_id() -> str:
    """An id for a call, to which its result refers."""
    return f"call_{os.urandom(12).hex()}"


def split(use: ToolUse, text: str, reason: str, stop_word: str = "") -> tuple[str, Sequence[ToolCall]]:
    """The text of an answer without its calls, and the calls. Text that only looks like a call stays in the text.

    `stop_word`: see Delta.
    """
    told = AnswerCalls(use).push(text, reason, stop_word)
    calls = [each for each in told if isinstance(each, CallDelta)]
    return said_in(told), [ToolCall(each.name or "", each.arguments, each.last) for each in calls]


def said_in(told: Sequence[str | CallDelta]) -> str:
    """The text without the calls."""
    return "".join(each for each in told if isinstance(each, str))


def reason_of(use: ToolUse, reason: str, *, calls: bool, cut: bool, stopped: bool) -> str:
    """The finish reason of an answer with or without calls, the last of which may be `cut`.

    `stopped`: a stop word of the request ended the answer. OpenAI's API has `stop` for a named function. A required
    call is complete unless a limit or a stop word cut it; clients must not execute a call that these cut.
    """
    asks = calls and use.mode != "named" and not (cut and (use.mode == "required" or stopped))
    return "tool_calls" if asks and reason == "stop" else reason


class StreamedCalls:
    """The calls in the stream of one choice."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._reader = AnswerCalls(use)

    def take(self, delta: Delta) -> tuple[Delta, Sequence[str | CallDelta]]:
        """The delta without calls, and its texts and new data of calls in their order."""
        reason = delta.finish_reason
        told = self._reader.push(delta.text, reason, delta.stop_word)
        if reason is not None:
            found, cut, stopped = self._reader.found, self._reader.cut, bool(delta.stop_word)
            reason = reason_of(self._use, reason, calls=found, cut=cut, stopped=stopped)
        return replace(delta, text=said_in(told), finish_reason=reason), told
