"""Converts a request to /v1/chat/completions to one for a text model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trtforge.core.reasoning import NewReader, Reader, ReasoningParser, reader_of
from trtforge.gateway.errors import bad_request
from trtforge.gateway.fields import Fields, wrong
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.messages import (
    MESSAGE_ROLES,
    TEMPLATE_FIELDS,
    asks_to_think,
    continued_text,
    conversation,
    earlier_call,
    effort_of,
    text_of,
)
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

_REASONING = ("reasoning_content", "reasoning")
_REFUSED = ("audio", "modalities", "verbosity", "web_search_options", "moderation")
_EFFORT = "reasoning_effort"
_GUIDED = ("response_format", "tools", "tool_choice", "functions", "function_call")
KNOWN = (
    SHARED
    | WITHOUT_EFFECT
    | frozenset(("messages", "max_completion_tokens", "top_logprobs", _EFFORT, *TEMPLATE_FIELDS, *_REFUSED, *_GUIDED))
)
_ROLES = MESSAGE_ROLES | {"tool": "tool"}
_PARTS = {"text": "text", "refusal": "refusal"}


@dataclass(frozen=True)
class ChatCall:
    """A request for chat. `name`: the model's name in the request.

    `thinks`: see `asks_to_think`; `continued`: see `continued_text`.
    """

    name: str
    request: TextRequest
    delivery: Delivery
    structure: Structure
    thinks: bool = True
    continued: str | None = None

    def new_reader(self, model: ReasoningParser | None) -> NewReader | None:
        """Creates readers that find the reasoning in answers; `model`: the model's parser.

        None for guided answers, which have no reasoning. The final message, if the answer continues it, or else the
        prompt's end tells whether an answer begins with reasoning. Models of older packages do not report the prompt's
        end: then the parser tells, unless the request turns thinking off.
        """
        return None if self.request.guide is not None else partial(self._reader, model)

    def _reader(self, model: ReasoningParser | None, prompted: str | None) -> Reader:
        functions = () if self.structure.use is None else self.structure.use.names
        if self.continued is not None:
            return reader_of(model, functions, self.continued)
        return reader_of(model, functions, "" if prompted is None and not self.thinks else prompted)


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
    messages = _messages(fields, limits)
    effort = effort_of(fields.get(_EFFORT), _EFFORT)
    request = TextRequest(
        model=name,
        messages=conversation(messages, structure, fields, effort),
        max_tokens=_max_tokens(fields),
        stream=delivery.stream,
        sequences=read_count(fields, limits),
        sampling=read_sampling(fields, limits),
        stop=read_stop(fields, limits),
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0,
        guide=structure.guide,
    )
    continued = continued_text(messages, fields)
    return ChatCall(name, request, delivery, structure, asks_to_think(fields, effort), continued)


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


def _messages(fields: Fields, limits: GatewayLimits) -> list[Mapping[str, object]]:
    given = fields.get("messages")
    if given is None:
        raise bad_request("you must provide the parameter messages", "messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", "a non-empty array", given)
    if len(given) > limits.messages:
        raise bad_request(f"messages has {len(given)} items, at most {limits.messages} are accepted", "messages")
    return [_message(message, f"messages[{number}]", limits) for number, message in enumerate(given)]


def _message(given: object, where: str, limits: GatewayLimits) -> Mapping[str, object]:
    if not isinstance(given, dict):
        raise wrong(where, "an object", given)
    role = given.get("role")
    if role == "function" or given.get("function_call"):
        raise bad_request(f"{where}: functions are not supported, send tools", where)
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    if role == "assistant":
        return _answered(given, where, limits)
    message = {"role": _ROLES[role], "content": text_of(given.get("content"), f"{where}.content", _PARTS, limits)}
    if role != "tool":
        return message
    answered = given.get("tool_call_id")
    if not isinstance(answered, str) or not answered:
        raise wrong(f"{where}.tool_call_id", "a non-empty string", answered)
    named = {"name": given["name"]} if isinstance(given.get("name"), str) else {}
    return {**message, "tool_call_id": answered, **named}


def _answered(given: Mapping[str, Any], where: str, limits: GatewayLimits) -> Mapping[str, object]:
    """An earlier answer in a request; its text may be null beside calls or a refusal."""
    calls, name = given.get("tool_calls"), "content"
    if given.get(name) is None and given.get("refusal") is not None:
        name = "refusal"
    content = "" if given.get(name) is None and calls is not None else given.get(name)
    message = {"role": "assistant", "content": text_of(content, f"{where}.{name}", _PARTS, limits)}
    made = [] if calls is None else _calls(calls, f"{where}.tool_calls", limits)
    found = {"tool_calls": made} if made else {}
    return {**message, **found, **_reasoning(given, where)}


def _reasoning(given: Mapping[str, Any], where: str) -> Mapping[str, object]:
    """The reasoning of an earlier answer, which chat templates may show to the model again."""
    sent = {name: given[name] for name in _REASONING if given.get(name) is not None}
    for name, text in sent.items():
        if not isinstance(text, str):
            raise wrong(f"{where}.{name}", "a string", text)
    reasoning = next(filter(None, sent.values()), None)
    return {} if reasoning is None else {"reasoning_content": reasoning}


def _calls(given: object, where: str, limits: GatewayLimits) -> list[Mapping[str, object]]:
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
        calls.append(earlier_call(str(call.get("id", "")), function["name"], text, limits))
    return calls
