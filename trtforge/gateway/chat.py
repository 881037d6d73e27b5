"""A request to /v1/chat/completions as one to a text model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.gateway.errors import ApiError, bad_request
from trtforge.gateway.fields import Fields, wrong
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.request import TextRequest
from trtforge.gateway.sampling_fields import (
    MOST_TOKENS,
    SHARED,
    WITHOUT_EFFECT,
    Delivery,
    read_count,
    read_delivery,
    read_sampling,
    read_stop,
)
from trtforge.gateway.tools import Structure, read_structure

_TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_REFUSED = ("audio", "modalities", "reasoning_effort", "verbosity", "web_search_options", "moderation")
_GUIDED = ("response_format", "tools", "tool_choice", "functions", "function_call")
KNOWN = (
    SHARED
    | WITHOUT_EFFECT
    | frozenset(("messages", "max_completion_tokens", "top_logprobs", *_TEMPLATE, *_REFUSED, *_GUIDED))
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of messages to those of chat templates, which know no developer."""


@dataclass(frozen=True)
class ChatCall:
    """A request for chat. `name`: of the model, as the client gave it."""

    name: str
    request: TextRequest
    delivery: Delivery
    structure: Structure


def read_chat(values: Mapping[str, Any], limits: GatewayLimits) -> ChatCall:
    """The call in a request's JSON. Raises ApiError (400)."""
    fields = Fields(values, KNOWN)
    name = fields.text("model")
    structure = read_structure(fields)
    _refuse_others(fields)
    logprobs = fields.flag("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, limits.top_logprobs)
    if top_logprobs is not None and not logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    delivery = read_delivery(fields)
    request = TextRequest(
        model=name,
        messages=_messages(fields, structure.tools, limits),
        max_tokens=_max_tokens(fields),
        stream=delivery.stream,
        sequences=read_count(fields, limits),
        sampling=read_sampling(fields, limits),
        stop=read_stop(fields, limits),
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0,
        guide=structure.guide,
    )
    return ChatCall(name, request, delivery, structure)


def _max_tokens(fields: Fields) -> int:
    newer = fields.integer("max_completion_tokens", 1, MOST_TOKENS)
    older = fields.integer("max_tokens", 1, MOST_TOKENS)
    return newer or older or MOST_TOKENS


def _refuse_others(fields: Fields) -> None:
    if fields.get("modalities") == ["text"] and "audio" not in fields:
        refused = [name for name in _REFUSED if name in fields and name != "modalities"]
    else:
        refused = [name for name in _REFUSED if name in fields]
    if refused:
        raise bad_request(f"{refused[0]} is not supported by this server", refused[0])


def _messages(fields: Fields, tools: Sequence[Mapping[str, Any]], limits: GatewayLimits) -> str:
    """The JSON of the tensor `messages`."""
    given = fields.get("messages")
    if given is None:
        raise bad_request("you must provide the parameter messages", "messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", "a non-empty array", given)
    if len(given) > limits.messages:
        raise bad_request(f"messages has {len(given)} items, at most {limits.messages} are accepted", "messages")
    messages = [_message(message, f"messages[{number}]", limits) for number, message in enumerate(given)]
    options: dict[str, object] = {"tools": tools} if tools else {}
    for option in _TEMPLATE[:2]:
        if option in fields:
            options[option] = fields.flag(option)
    if "chat_template_kwargs" in fields:
        options["chat_template_kwargs"] = fields.object("chat_template_kwargs")
    return json.dumps({"messages": messages, **options} if options else messages, ensure_ascii=False)


def _message(given: object, where: str, limits: GatewayLimits) -> Mapping[str, object]:
    if not isinstance(given, dict):
        raise wrong(where, "an object", given)
    role = given.get("role")
    if role == "function" or given.get("function_call"):
        raise bad_request(f"{where}: functions are not supported, send tools", where)
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    if role == "assistant" and given.get("tool_calls"):
        calls = _calls(given["tool_calls"], f"{where}.tool_calls", limits)
        said = given.get("content") or ""
        return {"role": role, "content": _content(said, f"{where}.content", limits), "tool_calls": calls}
    message = {"role": _ROLES[role], "content": _content(given.get("content"), f"{where}.content", limits)}
    if role != "tool":
        return message
    answered = given.get("tool_call_id")
    if not isinstance(answered, str) or not answered:
        raise wrong(f"{where}.tool_call_id", "a non-empty string", answered)
    return {**message, "tool_call_id": answered}


def _calls(given: object, where: str, limits: GatewayLimits) -> list[Mapping[str, object]]:
    """Earlier calls, with their arguments as objects, which chat templates expect (as of `transformers`)."""
    if not isinstance(given, list) or len(given) > limits.parts:
        raise wrong(where, f"an array of at most {limits.parts} calls", given)
    calls: list[Mapping[str, object]] = []
    for number, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}[{number}] must be an object of type function with a function", where)
        text = function.get("arguments")
        if not isinstance(text, str):
            raise wrong(f"{where}[{number}].function.arguments", "a string", text)
        try:
            arguments = parse_json(text, "", hint="", values=limits.json_values)
        except ForgeError:
            arguments = text
        shown = {"name": function["name"], "arguments": arguments}
        calls.append({"id": str(call.get("id", "")), "type": "function", "function": shown})
    return calls


def _content(given: object, where: str, limits: GatewayLimits) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong(where, "a string or an array of text parts", given)
    if len(given) > limits.parts:
        raise bad_request(f"{where} has {len(given)} parts, at most {limits.parts} are accepted", where)
    texts = []
    for number, part in enumerate(given):
        texts.append(_part(part, f"{where}[{number}]"))
    return "".join(texts)


def _part(given: object, where: str) -> str:
    if not isinstance(given, dict):
        raise wrong(where, "an object", given)
    kind = given.get("type")
    if kind not in ("text", "refusal"):
        raise _other_part(kind, where)
    text = given.get(kind)
    if not isinstance(text, str):
        raise wrong(f"{where}.{kind}", "a string", text)
    return text


def _other_part(kind: object, where: str) -> ApiError:
    shown = kind[:40] if isinstance(kind, str) else "missing"
    return bad_request(f"{where}: parts of type {shown!r} are not supported, this model takes text", where)
