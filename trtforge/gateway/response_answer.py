"""Answers of /v1/responses: whole, and as the events of a stream, which ends with the whole one."""

import json
from collections.abc import Sequence
from typing import Any

from trtforge.gateway.errors import ApiError
from trtforge.gateway.generation import Choice, Usage
from trtforge.gateway.request import TokenScore
from trtforge.gateway.response_object import (
    Item,
    ResponseObject,
    Status,
    call_item,
    listed,
    message_item,
    new_id,
    reasoning_item,
    reasoning_part,
    text_part,
)
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import HeldCalls, ToolCall, split
from trtforge.gateway.tools import ToolUse


class ResponseAnswer:
    """/v1/responses. See Answer. `use`: how the answer may call functions."""

    def __init__(self, response: ResponseObject, use: ToolUse | None) -> None:
        self._response = response
        self._use = use
        self._held = None if use is None else HeldCalls(use)
        self._number = 0
        self._reasoning: _Reasoning | None = None
        self._message: _Message | None = None
        self._unsent: list[TokenScore] = []
        self._output: list[Item] = []
        self._status: Status = "in_progress"

    def whole(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        """See Answer."""
        (choice,) = choices
        text, calls = (choice.text, ()) if self._use is None else split(self._use, choice.text)
        status = _ended(choice.finish_reason)
        output: list[Item] = []
        if choice.reasoning:
            output.append(_Reasoning([choice.reasoning]).item("completed" if text or calls else status))
        if text or not (calls or output):
            output.append(_Message(len(output), [text], choice.logprobs).item(status))
        output += [self._call(call, status) for call in calls]
        return _encode(self._response.ended(status, output, usage)).encode()

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
        events += self._thinks(delta.reasoning)
        if self._reasoning is not None and (delta.text or last):
            events += self._reasoning_ends(
                self._reasoning, "completed" if delta.text or calls else _ended(delta.finish_reason)
            )
        if self._message is None and (delta.text or (last and not calls and not self._output)):
            self._message = _Message(len(self._output), [], [])
            events += self._message_begins(self._message)
        if self._message is not None and (delta.text or (last and self._unsent)):
            events.append(self._text(self._message, delta.text))
        if delta.finish_reason is not None:
            self._status = _ended(delta.finish_reason)
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
        unfinished = self._reasoning or self._message
        output = [*self._output, *([] if unfinished is None else [unfinished.item("incomplete")])]
        return self._event("response.failed", response=self._response.failed(error, output)).encode()

    def _thinks(self, text: str) -> list[str]:
        """The events of new reasoning, which comes before everything else."""
        if not text:
            return []
        events = []
        if self._reasoning is None:
            self._reasoning = _Reasoning([])
            item = reasoning_item(self._reasoning.identity, (), "in_progress")
            part = {**self._reasoning.place, "part": reasoning_part("")}
            events += [
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **part),
            ]
        self._reasoning.texts.append(text)
        return [*events, self._event("response.reasoning_text.delta", **self._reasoning.place, delta=text)]

    def _reasoning_ends(self, reasoning: "_Reasoning", status: Status) -> list[str]:
        self._reasoning, item = None, reasoning.item(status)
        self._output.append(item)
        return [
            self._event("response.reasoning_text.done", **reasoning.place, text=reasoning.text),
            self._event("response.content_part.done", **reasoning.place, part=reasoning_part(reasoning.text)),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _message_begins(self, message: "_Message") -> list[str]:
        item = message_item(message.identity, (), "in_progress")
        return [
            self._event("response.output_item.added", output_index=message.index, item=item),
            self._event("response.content_part.added", **message.place, part=text_part("", ())),
        ]

    def _text(self, message: "_Message", text: str) -> str:
        """The event of a text. A stream has one for every few tokens, so it is written without an object for all."""
        scores = _encode(listed(self._unsent)) if self._unsent else "[]"
        message.texts.append(text)
        message.scores += self._unsent
        self._unsent = []
        number = self._number
        self._number += 1
        return f'{message.beginning}{number},"delta":{json.dumps(text)},"logprobs":{scores}}}\n\n'

    def _message_ends(self, message: "_Message") -> list[str]:
        text, scores = "".join(message.texts), listed(message.scores)
        item = message.item(self._status)
        self._output.append(item)
        self._message = None
        return [
            self._event("response.output_text.done", **message.place, text=text, logprobs=scores),
            self._event("response.content_part.done", **message.place, part=message.part()),
            self._event("response.output_item.done", output_index=message.index, item=item),
        ]

    def _called(self, call: ToolCall) -> list[str]:
        index, item = len(self._output), self._call(call, self._status)
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": index}
        added = item | {"status": "in_progress", "arguments": ""}
        return [
            self._event("response.output_item.added", output_index=index, item=added),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _call(self, call: ToolCall, status: Status) -> Item:
        """A call, which is complete unless the answer is nothing but the arguments of a named function."""
        named = self._use is not None and self._use.mode == "named"
        return call_item(call, status if named else "completed")

    def _event(self, kind: str, **values: Any) -> str:
        number = self._number
        self._number += 1
        return f"event: {kind}\ndata: {_encode({'type': kind, 'sequence_number': number, **values})}\n\n"


class _Reasoning:
    """The reasoning of an answer, as far as it came: the first item of the output. `place`: of its text."""

    def __init__(self, texts: list[str]) -> None:
        self.identity = new_id("rs")
        self.texts = texts
        self.place = {"item_id": self.identity, "output_index": 0, "content_index": 0}

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    def item(self, status: Status) -> Item:
        """The reasoning as an item of the output."""
        return reasoning_item(self.identity, (self.text,), status)


class _Message:
    """The message of an answer, as far as it came, and the `index` of its item.

    `place`: of its text; `beginning`: of the events of that.
    """

    def __init__(self, index: int, texts: list[str], scores: list[TokenScore]) -> None:
        self.identity = new_id("msg")
        self.index = index
        self.texts = texts
        self.scores = scores
        self.place = {"item_id": self.identity, "output_index": index, "content_index": 0}
        kind = "response.output_text.delta"
        head = _encode({"type": kind, **self.place})
        self.beginning = f'event: {kind}\ndata: {head[:-1]},"sequence_number":'

    def part(self) -> Item:
        """Its content."""
        return text_part("".join(self.texts), self.scores)

    def item(self, status: Status) -> Item:
        """The message as an item of the output."""
        return message_item(self.identity, (self.part(),), status)


def _ended(reason: str | None) -> Status:
    return "incomplete" if reason == "length" else "completed"


def _encode(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
