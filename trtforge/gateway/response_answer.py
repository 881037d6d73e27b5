"""Answers of /v1/responses: whole, and as events of a stream, the last of which contains the whole answer."""

import json
from collections.abc import Sequence
from typing import Any

from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.errors import ApiError
from trtforge.gateway.generation import Choice, Usage
from trtforge.gateway.request import TokenScore, scores_shown
from trtforge.gateway.response_object import (
    Item,
    ResponseObject,
    Status,
    call_item,
    message_item,
    new_id,
    reasoning_item,
    reasoning_part,
    text_part,
)
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall
from trtforge.gateway.tools import ToolUse


class ResponseAnswer:
    """/v1/responses. See Answer. `use`: how the answer may call functions."""

    def __init__(self, response: ResponseObject, use: ToolUse | None) -> None:
        self._response = response
        self._calls = None if use is None else StreamedCalls(use)
        self._number = 0
        self._reasoning: _Reasoning | None = None
        self._message: _Message | None = None
        self._call: _Call | None = None
        self._unsent: list[TokenScore] = []
        self._output: list[Item] = []
        self._status: Status = "in_progress"

    def whole(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        """See Answer."""
        (choice,) = choices
        deltas = [Delta(0, text, reasoning=reasoning) for reasoning, text in choice.parts or [("", "")]]
        next((delta for delta in deltas if delta.text), deltas[-1]).logprobs = choice.logprobs
        deltas[-1].finish_reason, deltas[-1].stop_word = choice.finish_reason, choice.stop_word
        for delta in deltas:
            self.events(delta)
        return _encode(self._response.ended(self._status, self._output, usage)).encode()

    def events(self, delta: Delta) -> bytes:
        """See Answer."""
        events = []
        if not self._number:
            response = self._response.begun()
            events += [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        told: Sequence[str | CallDelta] = (delta.text,) if delta.text else ()
        if self._calls is not None:
            delta, told = self._calls.take(delta)
        self._unsent += delta.logprobs
        last = delta.finish_reason is not None
        events += self._thinks(delta.reasoning)
        if self._reasoning is not None and (told or last):
            events += self._reasoning_ends(self._reasoning, "completed" if told else _ended(delta.finish_reason))
        for each in told:
            events += self._says(each) if isinstance(each, str) else self._calls_on(each)
        if delta.finish_reason is not None:
            self._status = _ended(delta.finish_reason)
            events += self._says("") if self._says_last() else []
            events += self._item_ends(self._status)
        return "".join(events).encode()

    def end(self, usage: Usage | None) -> bytes:
        """See Answer."""
        response = self._response.ended(self._status, self._output, usage)
        return self._event(f"response.{self._status}", response=response).encode()

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        unfinished = self._reasoning or self._message or self._call
        output = [*self._output, *([] if unfinished is None else [unfinished.item("incomplete")])]
        return self._event("response.failed", response=self._response.failed(error, output)).encode()

    def _thinks(self, text: str) -> list[str]:
        """The events of new reasoning, which precedes other text; after other items it becomes a separate item."""
        if not text:
            return []
        events = []
        if self._reasoning is None:
            events += self._item_ends("completed")
            self._reasoning = _Reasoning(len(self._output), [])
            item = reasoning_item(self._reasoning.identity, (), "in_progress")
            part = {**self._reasoning.place, "part": reasoning_part("")}
            events += [
                self._event("response.output_item.added", output_index=self._reasoning.index, item=item),
                self._event("response.content_part.added", **part),
            ]
        if self._output and not any(self._reasoning.texts):
            text = text.lstrip()
        if not text:
            return events
        self._reasoning.texts.append(text)
        return [*events, self._event("response.reasoning_text.delta", **self._reasoning.place, delta=text)]

    def _reasoning_ends(self, reasoning: "_Reasoning", status: Status) -> list[str]:
        self._reasoning, item = None, reasoning.item(status)
        self._output.append(item)
        return [
            self._event("response.reasoning_text.done", **reasoning.place, text=reasoning.text),
            self._event("response.content_part.done", **reasoning.place, part=reasoning_part(reasoning.text)),
            self._event("response.output_item.done", output_index=reasoning.index, item=item),
        ]

    def _says(self, text: str) -> list[str]:
        """The events of new text, without leading white space after other items."""
        events = []
        if self._message is None:
            events += self._item_ends("incomplete")
            self._message = _Message(len(self._output), [], [])
            events += self._message_begins(self._message)
        if self._output and not any(self._message.texts):
            text = text.lstrip()
        return [*events, self._text(self._message, text)] if text or self._unsent else events

    def _says_last(self) -> bool:
        """Whether the message needs another event: for unsent scores, or because there is no other output."""
        if self._message is not None:
            return bool(self._unsent)
        return self._call is None and not self._output

    def _item_ends(self, status: Status) -> list[str]:
        """The events that end a message or a call that has begun."""
        if self._message is not None:
            return self._message_ends(self._message, status)
        return [] if self._call is None else self._call_ends(self._call, "incomplete")

    def _message_begins(self, message: "_Message") -> list[str]:
        item = message_item(message.identity, (), "in_progress")
        return [
            self._event("response.output_item.added", output_index=message.index, item=item),
            self._event("response.content_part.added", **message.place, part=text_part("", ())),
        ]

    def _text(self, message: "_Message", text: str) -> str:
        """The event of a text. As a stream has one for every few tokens, it is composed as text."""
        scores = _encode(scores_shown(self._unsent)) if self._unsent else "[]"
        message.texts.append(text)
        message.scores += self._unsent
        self._unsent = []
        number = self._number
        self._number += 1
        return f'{message.beginning}{number},"delta":{json.dumps(text)},"logprobs":{scores}}}\n\n'

    def _message_ends(self, message: "_Message", status: Status) -> list[str]:
        text, scores = "".join(message.texts), scores_shown(message.scores)
        item = message.item(status)
        self._output.append(item)
        self._message = None
        return [
            self._event("response.output_text.done", **message.place, text=text, logprobs=scores),
            self._event("response.content_part.done", **message.place, part=message.part()),
            self._event("response.output_item.done", output_index=message.index, item=item),
        ]

    def _calls_on(self, delta: CallDelta) -> list[str]:
        """The events of new data of a call."""
        events = []
        if delta.name is not None:
            events += self._item_ends("completed")
            self._call = _Call(len(self._output), delta.name, [])
            item = self._call.item("in_progress")
            events.append(self._event("response.output_item.added", output_index=self._call.index, item=item))
        assert self._call is not None
        if delta.arguments:
            self._call.arguments.append(delta.arguments)
            place = self._call.place
            events.append(self._event("response.function_call_arguments.delta", **place, delta=delta.arguments))
        return events + (self._call_ends(self._call, "completed") if delta.last else [])

    def _call_ends(self, call: "_Call", status: Status) -> list[str]:
        self._call, item = None, call.item(status)
        self._output.append(item)
        arguments = item["arguments"]
        return [
            self._event("response.function_call_arguments.done", **call.place, arguments=arguments),
            self._event("response.output_item.done", output_index=call.index, item=item),
        ]

    def _event(self, kind: str, **values: Any) -> str:
        number = self._number
        self._number += 1
        return f"event: {kind}\ndata: {_encode({'type': kind, 'sequence_number': number, **values})}\n\n"


class _Reasoning:
    """The reasoning so far and the `index` of its item. `place`: of its text."""

    def __init__(self, index: int, texts: list[str]) -> None:
        self.identity = new_id("rs")
        self.index = index
        self.texts = texts
        self.place = {"item_id": self.identity, "output_index": index, "content_index": 0}

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    def item(self, status: Status) -> Item:
        """The reasoning as an item of the output."""
        return reasoning_item(self.identity, (self.text,), status)


class _Message:
    """The message so far and the `index` of its item.

    `place`: of its text; `beginning`: of its text's events.
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
        """Its content part."""
        return text_part("".join(self.texts), self.scores)

    def item(self, status: Status) -> Item:
        """The message as an item of the output."""
        return message_item(self.identity, (self.part(),), status)


class _Call:
    """A call so far and the `index` of its item. `place`: of its arguments."""

    def __init__(self, index: int, name: str, arguments: list[str]) -> None:
        self._identity, self._call_id, self._name = new_id("fc"), new_id("call"), name
        self.index = index
        self.arguments = arguments
        self.place = {"item_id": self._identity, "output_index": index}

    def item(self, status: Status) -> Item:
        """The call as an item of the output."""
        return call_item(self._identity, self._call_id, ToolCall(self._name, "".join(self.arguments)), status)


def _ended(reason: str | None) -> Status:
    return "incomplete" if reason == "length" else "completed"


def _encode(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
