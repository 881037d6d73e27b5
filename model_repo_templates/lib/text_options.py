"""What text models take in addition to TensorRT-LLM's tensors, and what they return for it.

`return_finish_reason`, `return_num_input_tokens` and `return_num_output_tokens` are named as in Triton's vLLM backend,
`return_num_cached_tokens` and `return_prompt_thought` like them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from input_names import PHASE, REQUEST_TYPE, SAMPLING
from input_values import InputValues
from numpy.typing import NDArray
from responder import RequestFailed

MOST_TOP_LOGPROBS = 20
OPTIONS = (
    "messages",
    "input_ids",
    "logit_bias",
    "include_stop_str_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
    "return_prompt_thought",
    "return_logprobs",
    "top_logprobs",
    "return_prompt_logprobs",
    "priority",
    "cache_salt",
    *SAMPLING,
    REQUEST_TYPE,
    PHASE,
)


@dataclass(frozen=True)
class TextOptions:
    """One request's options; None: not given. `top_logprobs`: alternatives beside each token.

    `request_type` and `phase`: of disaggregated serving, as TensorRT-LLM's engine model has them. `sampling`: inputs
    that TensorRT-LLM's executor has no tensors for.
    """

    include_stop_words: bool
    finish_reason: bool
    num_input_tokens: bool
    num_output_tokens: bool
    num_cached_tokens: bool
    prompt_thought: bool
    logprobs: bool
    prompt_logprobs: bool
    top_logprobs: int
    priority: float | None
    cache_salt: str | None
    request_type: str
    phase: NDArray[np.uint8] | None
    sampling: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, inputs: Mapping[str, NDArray[Any]]) -> "TextOptions":
        """The options in a request's inputs. Raises RequestFailed."""
        values = InputValues(inputs)
        return cls(
            include_stop_words=values.flag("include_stop_str_in_output", True),
            finish_reason=values.flag("return_finish_reason", False),
            num_input_tokens=values.flag("return_num_input_tokens", False),
            num_output_tokens=values.flag("return_num_output_tokens", False),
            num_cached_tokens=values.flag("return_num_cached_tokens", False),
            prompt_thought=values.flag("return_prompt_thought", False),
            logprobs=values.flag("return_logprobs", False),
            prompt_logprobs=values.flag("return_prompt_logprobs", False),
            top_logprobs=values.integer("top_logprobs", 0, 0, 0, MOST_TOP_LOGPROBS),
            priority=values.share("priority", 0, None),
            cache_salt=_cache_salt(values),
            request_type=values.text(REQUEST_TYPE, 0),
            phase=values.array(PHASE) if PHASE in values else None,
            sampling={name: inputs[name] for name in SAMPLING if name in values},
        )

    @property
    def by_own_channel(self) -> str | None:
        """An input that is given and that only trtforge's own engine channel carries."""
        given = {
            "return_prompt_logprobs": self.prompt_logprobs,
            "top_logprobs": self.top_logprobs > 0,
            "priority": self.priority is not None,
            "cache_salt": self.cache_salt is not None,
            **dict.fromkeys(self.sampling, True),
        }
        return next((name for name, is_given in given.items() if is_given), None)

    def engine_inputs(self) -> dict[str, NDArray[Any]]:
        """The engine's inputs that answer these options."""
        inputs: dict[str, NDArray[Any]] = {}
        if self.logprobs:
            inputs["return_log_probs"] = np.array([[True]])
        if self.prompt_logprobs:
            inputs["return_prompt_logprobs"] = np.array([[True]])
        if self.top_logprobs:
            inputs["top_logprobs"] = np.array([[self.top_logprobs]], dtype=np.int32)
        if self.priority is not None:
            inputs["priority"] = np.array([[self.priority]], dtype=np.float32)
        if self.cache_salt is not None:
            inputs["cache_salt"] = np.array([[self.cache_salt.encode()]], dtype=np.object_)
        if self.request_type:
            inputs[REQUEST_TYPE] = np.array([[self.request_type.encode()]], dtype=np.object_)
        if self.phase is not None:
            inputs[PHASE] = self.phase
        return {**inputs, **self.sampling}


def _cache_salt(values: InputValues) -> str | None:
    """As in OpenAI's API of trtllm-serve: an empty one is refused, because it would separate nothing."""
    if "cache_salt" not in values:
        return None
    salt = values.text("cache_salt", 0)
    if not salt:
        raise RequestFailed("cache_salt is empty; leave it out, or give a text")
    return salt
