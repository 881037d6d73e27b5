"""The fields that chat and completions share: sampling, stop words, number of answers and streaming."""

import json
from collections.abc import Collection
from dataclasses import dataclass

from trtforge.engine_process.retention import LONGEST_SALT
from trtforge.gateway.errors import bad_request
from trtforge.gateway.fields import INT64, Fields, number_in, wrong
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.request import Sampling

MOST_TOKENS = 1 << 24
"""Default for chat: as many as fit. Engines end a sequence at their max_seq_len."""

_MOST_BIAS = 100.0

SHARED = frozenset(
    (
        "model",
        "stream",
        "stream_options",
        "n",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        # not OpenAI's
        "top_k",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "priority",
        "cache_salt",
        "min_p",
        "no_repeat_ngram_size",
        "prompt_ignore_length",
    )
)
"""Field names that both accept."""

WITHOUT_EFFECT = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
    )
)
"""Fields of OpenAI's API that are accepted and ignored, as they do not change an answer here."""


@dataclass(frozen=True)
class Delivery:
    """How answers are sent. `usage`: a stream ends with a chunk of token counts."""

    stream: bool
    usage: bool


def read_sampling(fields: Fields, limits: GatewayLimits) -> Sampling:
    """The sampling. Temperature 0 or top_p 0 is greedy; both are 1 by default, as in OpenAI's API."""
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1)
    top_k = fields.integer("top_k", -1, 1 << 20)
    repetition_penalty = fields.number("repetition_penalty", 0.01, 10)
    greedy = temperature == 0 or top_p == 0 or top_k == 1
    least = fields.integer("min_tokens", 0, MOST_TOKENS) or None
    return Sampling(
        temperature=None if greedy else 1.0 if temperature is None else temperature,
        top_p=None if greedy else 1.0 if top_p is None else top_p,
        top_k=top_k if top_k is not None and top_k > 1 and not greedy else None,
        seed=fields.integer("seed", -INT64, INT64 - 1),
        presence_penalty=fields.number("presence_penalty", -2, 2) or None,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or None,
        repetition_penalty=repetition_penalty,
        min_tokens=MOST_TOKENS if fields.flag("ignore_eos") else least,
        logit_bias=_logit_bias(fields, limits),
        priority=fields.number("priority", 0, 1),
        cache_salt=_cache_salt(fields),
        min_p=fields.number("min_p", 0, 1) or None,
        no_repeat_ngram_size=fields.integer("no_repeat_ngram_size", 0, 1 << 30) or None,
        prompt_ignore_length=fields.integer("prompt_ignore_length", 0, MOST_TOKENS) or None,
    )


def read_stop(fields: Fields, limits: GatewayLimits) -> tuple[str, ...]:
    """The stop words."""
    value = fields.get("stop", [])
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise wrong("stop", "a string or an array of strings", value)
    words = [word for word in words if word]
    if len(words) > limits.stop_words:
        raise bad_request(f"stop has {len(words)} strings, at most {limits.stop_words} are accepted", "stop")
    if any(len(word.encode()) > limits.stop_bytes for word in words):
        raise bad_request(f"a string in stop is longer than {limits.stop_bytes} bytes", "stop")
    return tuple(words)


def read_count(fields: Fields, limits: GatewayLimits) -> int:
    """The number of answers to each prompt."""
    return fields.integer("n", 1, limits.sequences) or 1


def read_delivery(
    fields: Fields, options_known: Collection[str] = ("include_usage", "include_obfuscation")
) -> Delivery:
    """Whether to stream, and the options of the stream."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if "stream_options" in fields and not stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    usage = Fields(options, options_known, "stream_options.").flag("include_usage")
    return Delivery(stream, usage)


def _cache_salt(fields: Fields) -> str | None:
    salt = fields.text("cache_salt") if "cache_salt" in fields else None
    if salt is not None and len(salt) > LONGEST_SALT:
        raise bad_request(f"cache_salt has {len(salt)} characters, at most {LONGEST_SALT} are accepted", "cache_salt")
    return salt


def _logit_bias(fields: Fields, limits: GatewayLimits) -> str | None:
    given = fields.object("logit_bias")
    if not given:
        return None
    if len(given) > limits.biased_tokens:
        raise bad_request(
            f"logit_bias has {len(given)} tokens, at most {limits.biased_tokens} are accepted", "logit_bias"
        )
    bias = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise bad_request("the keys of logit_bias must be token ids", "logit_bias")
        bias[token] = number_in("logit_bias", value, -_MOST_BIAS, _MOST_BIAS)
    return json.dumps(bias, separators=(",", ":"))
