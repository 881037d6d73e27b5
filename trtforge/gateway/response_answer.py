"""Answers of /v1/responses: whole, and as the events of a stream.

A whole answer is the one that the events of a stream with a single piece would end with.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trtforge.gateway.errors import ApiError
from trtforge.gateway.generation import Choice, Usage
from trtforge.gateway.request import TokenScore
from trtforge.gateway.response_object import (
    Item,
    ResponseObject,
    Status,
    call_item,
    event_scores,
    message_item,
    new_id,
    text_part,
)
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import HeldCalls, ToolCall
from trtforge.gateway.tools import ToolUse


class ResponseAnswer:
    """/v1/responses. See Answer. `use`: how the answer may call functions."""

    def __init__(self, response: ResponseObject, use: ToolUse | None) -> None:
        self._response = response
        self._use = use
        self._held = None if use is None else HeldCalls(use)
        self._number = 0
        self._message: _Message | None = None
        self._unsent: list[TokenScore] = []
        self._output: list[Item] = []
        self._status: Status = "in_progress"

    def whole(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        """See Answer."""
        (choice,) = choices
        self.events(Delta(0, choice.text, choice.finish_reason, choice.logprobs))
        return _encode(self._response.ended(self._status, self._output, usage)).encode()

    def events(self, delta: Delta) -> bytes:
        """See Answer."""
        events = []
        if not self._number:
            response = self._response.begun()
            events += [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        calls: Sequence[ToolCall] = ()
        if self._held is not None:
            delta, calls = self._held.take(delta)
        self._unsent += delta.logprobs
        last = delta.finish_reason is not None
        if self._message is None and (delta.text or (last and not calls)):
            self._message = _Message()
            events += self._message_begins(self._message)
        if self._message is not None and (delta.text or (last and self._unsent)):
            events.append(self._text(self._message, delta.text))
        if last:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            if self._message is not None:
                events += self._message_ends(self._message)
            for call in calls:
                events += self._called(call)
        return "".join(events).encode()

    def end(self, usage: Usage | None) -> bytes:
        """See Answer."""
        response = self._response.ended(self._status, self._output, usage)
        return self._event(f"response.{self._status}", response=response).encode()

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        output = list(self._output)
        if self._message is not None and not output:
            output.append(self._message.item("incomplete"))
        return self._event("response.failed", response=self._response.failed(error, output)).encode()

    def _message_begins(self, message: "_Message") -> list[str]:
        item = message_item(message.identity, (), "in_progress")
        part = {"item_id": message.identity, "output_index": 0, "content_index": 0, "part": text_part("", ())}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **part),
        ]

    def _text(self, message: "_Message", text: str) -> str:
        """The event of a text. A stream has one for every few tokens, so it is written without an object for all."""
        scores = _encode(event_scores(self._unsent)) if self._unsent else "[]"
        message.texts.append(text)
        message.scores += self._unsent
        self._unsent = []
        number = self._number
        self._number += 1
        return f'{message.beginning}{number},"delta":{json.dumps(text)},"logprobs":{scores}}}\n\n'

    def _message_ends(self, message: "_Message") -> list[str]:
        place = {"item_id": message.identity, "output_index": 0, "content_index": 0}
        text, scores = "".join(message.texts), event_scores(message.scores)
        item = message.item(self._status)
        self._output.append(item)
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=scores),
            self._event("response.content_part.done", **place, part=message.part()),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _called(self, call: ToolCall) -> list[str]:
        """The events of a call, which is complete unless the answer is nothing but the arguments of a named one."""
        identities = new_id("fc"), new_id("call")
        index = len(self._output)
        cut = self._use is not None and self._use.mode == "named"
        item = call_item(identities, call, self._status if cut else "completed")
        self._output.append(item)
        place = {"item_id": identities[0], "output_index": index}
        added = call_item(identities, ToolCall(call.name, ""), "in_progress")
        return [
            self._event("response.output_item.added", output_index=index, item=added),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _event(self, kind: str, **values: Any) -> str:
        number = self._number
        self._number += 1
        return f"event: {kind}\ndata: {_encode({'type': kind, 'sequence_number': number, **values})}\n\n"


class _Message:
    """The message of an answer, as far as it came. `beginning`: of the events of its texts."""

    def __init__(self) -> None:
        self.identity = new_id("msg")
        self.texts: list[str] = []
        self.scores: list[TokenScore] = []
        kind = "response.output_text.delta"
        place = _encode({"type": kind, "item_id": self.identity, "output_index": 0, "content_index": 0})
        self.beginning = f'event: {kind}\ndata: {place[:-1]},"sequence_number":'

    def part(self) -> Mapping[str, object]:
        """Its content."""
        return text_part("".join(self.texts), self.scores)

    def item(self, status: Status) -> Item:
        """The message as an item of the output."""
        return message_item(self.identity, (self.part(),), status)


def _encode(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
