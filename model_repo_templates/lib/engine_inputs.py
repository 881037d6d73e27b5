"""The tensors of an engine request as a generation request, or the reason why it cannot serve them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from responder import RequestFailed, flag_of
from word_lists import words_of

from trtforge.runtime.requests import GenerationRequest, SamplingParams

_READ = frozenset(
    {
        "input_ids",
        "input_lengths",
        "request_output_len",
        "end_id",
        "pad_id",
        "stop_words_list",
        "bad_words_list",
        "embedding_bias",
        "temperature",
        "runtime_top_k",
        "runtime_top_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "num_return_sequences",
        "return_log_probs",
        "return_perf_metrics",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "exclude_input_in_output",
        "streaming",
        "stop",
    }
)
_OF_BEAM_SEARCH = frozenset({"len_penalty", "early_stopping", "beam_search_diversity_rate"})
"""Without effect on a single beam, in TensorRT-LLM too."""

_NEUTRAL: Mapping[str, float] = {
    "beam_width": 1,
    "return_context_logits": 0,
    "return_generation_logits": 0,
    "runtime_top_p_min": 0,
    "runtime_top_p_decay": 1,
    "draft_acceptance_threshold": 0,
}
"""Inputs that are refused unless they ask for nothing."""


@dataclass(frozen=True)
class Limits:
    """What the model knows beside the request: vocabulary size and the model's own end ids."""

    vocab_size: int
    end_ids: tuple[int, ...]


def check_supported(inputs: Mapping[str, np.ndarray]) -> None:
    """Raises RequestFailed, naming the input, for anything that would have to be ignored."""
    for name, value in inputs.items():
        if name in _READ or name in _OF_BEAM_SEARCH or value.size == 0:
            continue
        if name not in _NEUTRAL:
            raise RequestFailed(f"{name} is not supported by this engine")
        if np.any(value != _NEUTRAL[name]):
            raise RequestFailed(f"{name} {value.flat[0]} is not supported by this engine")


def batch_size(inputs: Mapping[str, np.ndarray]) -> int:
    """How many prompts the request holds."""
    return int(inputs["input_lengths"].shape[0])


def sequences_per_prompt(inputs: Mapping[str, np.ndarray], item: int) -> int:
    """num_return_sequences of one prompt."""
    count = _number(inputs, "num_return_sequences", item, 1)
    if count < 1:
        raise RequestFailed(f"num_return_sequences must be at least 1, not {count}")
    return int(count)


def generation_request(
    inputs: Mapping[str, np.ndarray], item: int, sequence: int, name: str, limits: Limits, *, engine_end_ids: bool
) -> GenerationRequest:
    """The request for one returned sequence of one prompt. Raises RequestFailed for values out of range."""
    max_tokens = int(_number(inputs, "request_output_len", item, 0))
    if max_tokens < 1:
        raise RequestFailed(f"max_tokens (request_output_len) must be at least 1, not {max_tokens}")
    end_id = int(_number(inputs, "end_id", item, -1))
    return GenerationRequest(
        request_id=name,
        prompt=_prompt(inputs, item, limits.vocab_size),
        max_tokens=max_tokens,
        sampling=_sampling(inputs, item, sequence, limits.vocab_size),
        end_ids=frozenset(limits.end_ids if engine_end_ids else [end_id] if end_id >= 0 else []),
        stop_words=_words(inputs, "stop_words_list", item),
        bad_words=_words(inputs, "bad_words_list", item),
    )


def _prompt(inputs: Mapping[str, np.ndarray], item: int, vocab_size: int) -> tuple[int, ...]:
    if "input_ids" not in inputs:
        raise RequestFailed("input_ids is missing")
    row = inputs["input_ids"][item]
    length = int(inputs["input_lengths"][item].flat[0])
    if not 1 <= length <= len(row):
        raise RequestFailed(f"input_lengths is {length}, input_ids holds {len(row)} tokens")
    ids = row[:length]
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RequestFailed(f"input_ids holds an id outside 0 to {vocab_size - 1}")
    return tuple(ids.tolist())


def _sampling(inputs: Mapping[str, np.ndarray], item: int, sequence: int, vocab_size: int) -> SamplingParams:
    seed = _optional(inputs, "seed", item)
    top_k = _optional(inputs, "runtime_top_k", item)
    top_p = _optional(inputs, "runtime_top_p", item)
    bias = inputs["embedding_bias"][item] if "embedding_bias" in inputs else np.empty(0)
    if bias.size not in (0, vocab_size):
        raise RequestFailed(f"embedding_bias has {bias.size} values, the vocabulary {vocab_size}")
    return SamplingParams(
        temperature=_optional(inputs, "temperature", item),
        top_k=None if top_k is None else int(top_k),
        top_p=None if top_p is None or top_p <= 0 else float(top_p),
        seed=None if seed is None else int(seed) + sequence,
        repetition_penalty=_number(inputs, "repetition_penalty", item, 1.0),
        presence_penalty=_number(inputs, "presence_penalty", item, 0.0),
        frequency_penalty=_number(inputs, "frequency_penalty", item, 0.0),
        min_tokens=int(_number(inputs, "min_tokens", item, 0)),
        return_log_probs=flag_of(inputs, "return_log_probs", False),
        embedding_bias=tuple(bias.tolist()),
    )


def _words(inputs: Mapping[str, np.ndarray], name: str, item: int) -> tuple[tuple[int, ...], ...]:
    if name not in inputs:
        return ()
    try:
        return tuple(words_of(inputs[name][item]))
    except ValueError as error:
        raise RequestFailed(f"{name}: {error}") from None


def _number(inputs: Mapping[str, np.ndarray], name: str, item: int, default: float) -> Any:
    value = _optional(inputs, name, item)
    return default if value is None else value


def _optional(inputs: Mapping[str, np.ndarray], name: str, item: int) -> Any:
    value = inputs.get(name)
    return None if value is None or value.size == 0 else value[item].item()
