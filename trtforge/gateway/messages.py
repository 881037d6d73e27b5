"""The messages of a conversation in the format for chat templates: texts, earlier calls and their results."""

import json
from collections.abc import Mapping, Sequence

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.gateway.errors import ApiError, bad_request
from trtforge.gateway.fields import Fields, wrong
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.tools import Structure

_CONTINUES = "continue_final_message"
_FLAGS = ("add_generation_prompt", _CONTINUES)
_DOCUMENTS = "documents"
_VARIABLES = "chat_template_kwargs"
_THINKS = "enable_thinking"
TEMPLATE_FIELDS = (*_FLAGS, _VARIABLES, _DOCUMENTS)
"""Fields that are passed on to the chat template."""
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MESSAGE_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages to roles of chat templates, which lack the developer."""


def conversation(
    messages: Sequence[Mapping[str, object]],
    structure: Structure,
    fields: Fields,
    effort: str | None,
) -> str:
    """The JSON of the tensor `messages`. Raises ApiError for an invalid template field.

    `effort`: of the reasoning, passed to templates as `reasoning_effort` (gpt-oss), unless the template's fields set
    it; see `_variables`.
    """
    options: dict[str, object] = {"tools": structure.tools} if structure.tools else {}
    options |= {"guide_allows_calls": True} if structure.guide_allows_calls else {}
    for flag in _FLAGS:
        if flag in fields:
            options[flag] = fields.flag(flag)
    if _DOCUMENTS in fields:
        options[_DOCUMENTS] = _documents(fields.get(_DOCUMENTS))
    variables = _variables(fields, effort)
    if variables:
        options[_VARIABLES] = variables
    return json.dumps({"messages": messages, **options} if options else messages, ensure_ascii=False)


def effort_of(given: object, where: str) -> str | None:
    """The requested reasoning effort. Raises ApiError for values that OpenAI does not have."""
    if given is not None and given not in _EFFORTS:
        raise wrong(where, f"one of {', '.join(_EFFORTS)}", given)
    return given


def asks_to_think(fields: Fields, effort: str | None) -> bool:
    """False if variables of the chat template turn thinking off (Qwen3, DeepSeek-V3.1)."""
    variables = _variables(fields, effort)
    return all(variables.get(name) is not False for name in (_THINKS, "thinking"))


def _variables(fields: Fields, effort: str | None) -> Mapping[str, object]:
    """The request's variables of the chat template, and an effort's: "none" also turns thinking off, as in vLLM."""
    of_effort: Mapping[str, object] = {} if effort is None else {"reasoning_effort": effort}
    thinks = {_THINKS: False} if effort == "none" else {}
    return {**of_effort, **thinks, **fields.object(_VARIABLES)}


def _documents(given: object) -> object:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise wrong(_DOCUMENTS, "an array of objects", given)
    return given


def continued_text(messages: Sequence[Mapping[str, object]], fields: Fields) -> str | None:
    """The text of the final message if the answer shall continue it, else None."""
    return str(messages[-1].get("content") or "") if fields.flag(_CONTINUES) else None


def text_of(given: object, where: str, kinds: Mapping[str, str], limits: GatewayLimits) -> str:
    """The text of a content: a string, or parts. `kinds`: the accepted types of parts and the fields of their text."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise wrong(where, "a string or an array of text parts", given)
    if len(given) > limits.parts:
        raise bad_request(f"{where} has {len(given)} parts, at most {limits.parts} are accepted", where)
    return "".join(_part(part, f"{where}[{number}]", kinds) for number, part in enumerate(given))


def earlier_call(identity: str, name: str, arguments: str, limits: GatewayLimits) -> Mapping[str, object]:
    """An earlier call, with its arguments as an object, which chat templates expect (as of `transformers`).

    Blank `arguments` are an empty object: clients send them back for a call without arguments.
    """
    try:
        parsed = parse_json(arguments if arguments.strip() else "{}", "", hint="", values=limits.json_values)
    except ForgeError:
        parsed = arguments
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": parsed}}


def _part(given: object, where: str, kinds: Mapping[str, str]) -> str:
    if not isinstance(given, dict):
        raise wrong(where, "an object", given)
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise _other_part(kind, where)
    text = given.get(kinds[kind])
    if not isinstance(text, str):
        raise wrong(f"{where}.{kinds[kind]}", "a string", text)
    return text


def _other_part(kind: object, where: str) -> ApiError:
    shown = kind[:40] if isinstance(kind, str) else "missing"
    return bad_request(f"{where}: parts of type {shown!r} are not supported, this model takes text", where)
