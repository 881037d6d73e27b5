"""Converts a request to /v1/completions to one or more for a text model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtforge.gateway.errors import bad_request
from trtforge.gateway.fields import Fields, wrong
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.request import Prompt, TextRequest
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

KNOWN = SHARED | WITHOUT_EFFECT | frozenset(("prompt", "suffix", "echo", "best_of"))
_DEFAULT_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""
_LARGEST_ID = (1 << 31) - 1


@dataclass(frozen=True)
class CompletionCall:
    """A request for completions. `name`: the model's name in the request.

    `logprobs`: number of alternatives of each token; None: no scores. `nothing_new`: max_tokens is 0, so only the
    prompt is returned.
    """

    name: str
    requests: tuple[TextRequest, ...]
    delivery: Delivery
    echo: bool
    logprobs: int | None
    nothing_new: bool


def read_completion(values: Mapping[str, Any], limits: GatewayLimits) -> CompletionCall:
    """The call in a request's JSON. Raises ApiError (400)."""
    fields = Fields(values, KNOWN)
    name = fields.text("model")
    if fields.get("suffix", "") != "":
        raise bad_request("suffix is not supported by this server", "suffix")
    count = read_count(fields, limits)
    if fields.integer("best_of", 0, limits.sequences) not in (None, count):
        raise bad_request("best_of is not supported by this server; leave it out or make it equal to n", "best_of")
    prompts = _prompts(fields, limits)
    if len(prompts) * count > limits.choices:
        raise bad_request(f"prompts times n is {len(prompts) * count}, at most {limits.choices} are accepted", "n")
    echo = fields.flag("echo")
    logprobs = fields.integer("logprobs", 0, limits.top_logprobs)
    tokens = fields.integer("max_tokens", 0, MOST_TOKENS)
    if tokens == 0 and not echo:
        raise bad_request("max_tokens is 0, which is only allowed with echo", "max_tokens")
    delivery = read_delivery(fields)
    sampling, stop = read_sampling(fields, limits), read_stop(fields, limits)
    requests = tuple(
        TextRequest(
            model=name,
            prompt=prompt,
            max_tokens=_DEFAULT_TOKENS if tokens is None else max(tokens, 1),
            stream=delivery.stream,
            sequences=count,
            sampling=sampling,
            stop=stop,
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
            # The text of a prompt of token ids is known only from its scores.
            prompt_logprobs=echo and (logprobs is not None or isinstance(prompt, tuple)),
        )
        for prompt in prompts
    )
    return CompletionCall(name, requests, delivery, echo, logprobs, nothing_new=tokens == 0)


def _prompts(fields: Fields, limits: GatewayLimits) -> tuple[Prompt, ...]:
    """The prompts: from a string, strings, token ids or arrays of token ids."""
    given = fields.get("prompt")
    if given is None:
        raise bad_request("you must provide the parameter prompt", "prompt")
    if isinstance(given, str):
        return (_text(given),)
    if not isinstance(given, list) or not given:
        raise wrong("prompt", "a string, or a non-empty array of strings, token ids or arrays of token ids", given)
    if all(isinstance(item, int) for item in given):
        return (_ids(given),)
    if len(given) > limits.prompts:
        raise bad_request(f"prompt has {len(given)} items, at most {limits.prompts} are accepted", "prompt")
    if all(isinstance(item, str) for item in given):
        return tuple(_text(item) for item in given)
    if all(isinstance(item, list) for item in given):
        return tuple(_ids(item) for item in given)
    raise bad_request("prompt mixes strings, token ids and arrays", "prompt")


def _text(given: str) -> str:
    if not given:
        raise bad_request("prompt is empty; the model needs at least one token", "prompt")
    return given


def _ids(given: list[Any]) -> tuple[int, ...]:
    if not given:
        raise bad_request("prompt has an empty array; the model needs at least one token", "prompt")
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _LARGEST_ID for item in given):
        raise bad_request("token ids in prompt must be whole numbers from 0", "prompt")
    return tuple(given)
