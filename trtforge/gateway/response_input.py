"""Converts `input` and `instructions` of /v1/responses to chat messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtforge.gateway.errors import ApiError, bad_request
from trtforge.gateway.fields import Fields, wrong
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.messages import MESSAGE_ROLES, earlier_call, text_of

_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = {"reasoning_text": "text"}
_ACCEPTED = "message, function_call, function_call_output and reasoning"


def read_messages(fields: Fields, limits: GatewayLimits) -> list[Mapping[str, object]]:
    """The messages: the instructions as the system message, then those of the input. Raises ApiError."""
    found = _Messages(limits)
    if "instructions" in fields:
        found.add("system", _string(fields.get("instructions"), "instructions"))
    given = fields.get("input")
    if given is None:
        raise bad_request("you must provide the parameter input", "input")
    if isinstance(given, str):
        found.add("user", given)
        return found.messages
    if not isinstance(given, list) or not given:
        raise wrong("input", "a string or a non-empty array of items", given)
    if len(given) > limits.messages:
        raise bad_request(f"input has {len(given)} items, at most {limits.messages} are accepted", "input")
    for number, item in enumerate(given):
        found.take(item, f"input[{number}]")
    if not found.messages:
        raise bad_request("input holds nothing but reasoning", "input")
    return found.messages


@dataclass
class _Messages:
    """The messages so far. `calls`: the ids of their calls; `reasoning`: the reasoning before the next item."""

    limits: GatewayLimits
    messages: list[Mapping[str, object]] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)
    reasoning: str = ""

    def add(self, role: str, content: str, **more: object) -> None:
        """Append a message; an assistant's gets the reasoning before it."""
        if self.reasoning and role == "assistant":
            more["reasoning_content"] = self.reasoning
        self.reasoning = ""
        self.messages.append({"role": role, "content": content, **more})

    def take(self, item: object, where: str) -> None:
        """Append an item's content."""
        if not isinstance(item, dict):
            raise wrong(where, "an object", item)
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference" if "id" in item else None
        match kind:
            case "message":
                self._take_message(item, where)
            case "function_call":
                self._take_call(item, where)
            case "function_call_output":
                self._take_output(item, where)
            case "reasoning":
                content = item.get("content")
                content = [] if content is None else content  # it is only summarised or encrypted
                self.reasoning = text_of(content, f"{where}.content", _REASONING, self.limits)
            case _:
                raise _other_item(kind, where)

    def _take_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in MESSAGE_ROLES:
            raise wrong(f"{where}.role", f"one of {', '.join(MESSAGE_ROLES)}", role)
        content = text_of(item.get("content"), f"{where}.content", _PARTS, self.limits)
        self.add(MESSAGE_ROLES[role], content)

    def _take_call(self, item: Mapping[str, Any], where: str) -> None:
        """Add a call to the previous assistant message, as in chats, unless there is new reasoning."""
        identity = _named(item, "call_id", where)
        arguments = _string(item.get("arguments"), f"{where}.arguments")
        call = earlier_call(identity, _named(item, "name", where), arguments, self.limits)
        self.calls.add(identity)
        if self.reasoning or not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", "")
        last = self.messages[-1]
        before = last.get("tool_calls")
        if isinstance(before, list):
            before.append(call)
        else:
            self.messages[-1] = {**last, "tool_calls": [call]}

    def _take_output(self, item: Mapping[str, Any], where: str) -> None:
        identity = _named(item, "call_id", where)
        if identity not in self.calls:
            message = f"no function_call before {where} has its call_id; answers are not stored, so send the call too"
            raise bad_request(message, f"{where}.call_id")
        self.add("tool", text_of(item.get("output"), f"{where}.output", _PARTS, self.limits), tool_call_id=identity)


def _named(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(f"{where}.{name}", "a non-empty string", value)
    return value


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise wrong(where, "a string", value)
    return value


def _other_item(kind: object, where: str) -> ApiError:
    if kind == "item_reference":
        return bad_request(f"{where} is an item_reference; answers are not stored, so send the item itself", where)
    shown = kind[:40] if isinstance(kind, str) else "missing"
    return bad_request(f"{where}: items of type {shown!r} are not supported, {_ACCEPTED} are", where)
