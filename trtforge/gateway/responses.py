"""Converts a request to /v1/responses to a chat: the same model, sampling, tools and formats with other field names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtforge.gateway.chat import ChatCall
from trtforge.gateway.errors import bad_request
from trtforge.gateway.fields import Fields, wrong
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.messages import TEMPLATE_FIELDS, asks_to_think, continued_text, conversation, effort_of
from trtforge.gateway.request import TextRequest
from trtforge.gateway.response_input import read_messages
from trtforge.gateway.response_tools import read_asked
from trtforge.gateway.sampling_fields import (
    MOST_TOKENS,
    SHARED,
    WITHOUT_EFFECT,
    read_delivery,
    read_sampling,
    read_stop,
)

_SCORES = "message.output_text.logprobs"
_INCLUDED = (
    _SCORES,
    # Of items that our answers never have.
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
_MOVED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": f'"include": ["{_SCORES}"]',
    "n": "one answer to a request",
}
"""Fields of chat/completions and their replacements in /v1/responses."""
_REFUSED = {
    "previous_response_id": "answers are not stored by this server; send the earlier items in input",
    "conversation": "conversations are not stored by this server; send the earlier items in input",
    "prompt": "prompts are not stored by this server; send instructions and input",
    "context_management": "input is not shortened by this server; send fewer items in input",
    "moderation": "it is not supported by this server",
}
"""Fields that change an answer in OpenAI's API but are not supported here, and the alternatives."""
_SHOWN_NUMBERS = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Fields that `read_sampling` checks, with OpenAI's defaults."""
_SHOWN_TEXTS = ("prompt_cache_key", "safety_identifier", "user")
KNOWN = (
    (SHARED - frozenset(_MOVED))
    | (WITHOUT_EFFECT - {"prediction"})
    | frozenset(_REFUSED)
    | frozenset(TEMPLATE_FIELDS)
    | frozenset(
        (
            "input",
            "instructions",
            "max_output_tokens",
            "max_tool_calls",
            "tools",
            "tool_choice",
            "text",
            "include",
            "top_logprobs",
            "truncation",
            "background",
            "reasoning",
            "prompt_cache_options",
        )
    )
)
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
"""OpenAI's limits of metadata."""


@dataclass(frozen=True)
class ResponseCall:
    """A request for a response. `chat`: the equivalent chat; `shown`: the request's fields that answers repeat."""

    chat: ChatCall
    shown: Mapping[str, object]


def read_response(values: Mapping[str, Any], limits: GatewayLimits) -> ResponseCall:
    """The call in a request's JSON. Raises ApiError (400)."""
    _refuse_moved(values)
    fields = Fields(values, KNOWN)
    name = fields.text("model")
    _refuse_others(fields)
    asked = read_asked(fields)
    scored = _SCORES in _included(fields)
    top_logprobs = fields.integer("top_logprobs", 0, limits.top_logprobs) or 0
    if top_logprobs and not scored:
        raise bad_request(f'top_logprobs needs "include": ["{_SCORES}"]', "top_logprobs")
    max_tokens = fields.integer("max_output_tokens", 1, MOST_TOKENS)
    delivery = read_delivery(fields, ("include_obfuscation",))
    messages = read_messages(fields, limits)
    reasoning = Fields(fields.object("reasoning"), ("effort", "summary", "generate_summary", "context"), "reasoning.")
    effort = effort_of(reasoning.get("effort"), "reasoning.effort")
    request = TextRequest(
        model=name,
        messages=conversation(messages, asked.structure, fields, effort),
        max_tokens=max_tokens or MOST_TOKENS,
        stream=delivery.stream,
        sampling=read_sampling(fields, limits),
        stop=read_stop(fields, limits),
        logprobs=scored,
        top_logprobs=top_logprobs,
        guide=asked.structure.guide,
    )
    shown = {
        "instructions": fields.get("instructions"),
        "max_output_tokens": max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls", 1, MOST_TOKENS),
        "metadata": _metadata(fields),
        **{name: float(fields.get(name) if name in fields else default) for name, default in _SHOWN_NUMBERS.items()},
        "top_logprobs": top_logprobs,
        "reasoning": {"effort": effort, "summary": None},
        **asked.shown,
        **{name: _text(fields, name) for name in _SHOWN_TEXTS},
    }
    continued = continued_text(messages, fields)
    thinks = asks_to_think(fields, effort)
    return ResponseCall(ChatCall(name, request, delivery, asked.structure, thinks, continued), shown)


def _refuse_moved(values: Mapping[str, Any]) -> None:
    for name, instead in _MOVED.items():
        if values.get(name) is not None:
            raise bad_request(f"{name} is a field of chat/completions; /v1/responses has {instead}", name)


def _refuse_others(fields: Fields) -> None:
    for name, reason in _REFUSED.items():
        if name in fields:
            raise bad_request(f"{name} cannot be used: {reason}", name)
    if fields.flag("background"):
        reason = "answers are not stored by this server; leave it out, with stream true to read an answer as it comes"
        raise bad_request(f"background cannot be used: {reason}", "background")
    if fields.get("truncation") not in (None, "disabled"):
        raise bad_request("truncation must be disabled: send fewer items in input instead", "truncation")


def _included(fields: Fields) -> list[str]:
    given = fields.get("include", [])
    if not isinstance(given, list) or not all(each in _INCLUDED for each in given):
        raise wrong("include", f"an array of {', '.join(_INCLUDED)}", given)
    return given


def _metadata(fields: Fields) -> Mapping[str, str]:
    given = fields.object("metadata")
    if len(given) > _MOST_PAIRS or not all(
        len(key) <= _LONGEST_KEY and isinstance(value, str) and len(value) <= _LONGEST_VALUE
        for key, value in given.items()
    ):
        limits = f"{_MOST_PAIRS} strings of {_LONGEST_VALUE} characters, with keys of {_LONGEST_KEY}"
        raise bad_request(f"metadata must be an object of at most {limits}", "metadata")
    return given


def _text(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(name, "a string", value)
    return value
