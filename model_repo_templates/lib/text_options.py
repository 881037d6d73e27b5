"""What text models take in addition to TensorRT-LLM's tensors, and what they return for it.

`return_finish_reason`, `return_num_input_tokens` and `return_num_output_tokens` are named as in Triton's vLLM backend.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from input_values import InputValues
from numpy.typing import NDArray

MOST_TOP_LOGPROBS = 20
OPTIONS = (
    "messages",
    "input_ids",
    "logit_bias",
    "include_stop_str_in_output",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_logprobs",
    "top_logprobs",
    "return_prompt_logprobs",
)


@dataclass(frozen=True)
class TextOptions:
    """One request's options. `top_logprobs`: alternatives to report beside each token."""

    include_stop_words: bool
    finish_reason: bool
    num_input_tokens: bool
    num_output_tokens: bool
    logprobs: bool
    prompt_logprobs: bool
    top_logprobs: int

    @classmethod
    def of(cls, inputs: Mapping[str, NDArray[Any]]) -> "TextOptions":
        """The options in a request's inputs. Raises RequestFailed."""
        values = InputValues(inputs)
        return cls(
            include_stop_words=values.flag("include_stop_str_in_output", True),
            finish_reason=values.flag("return_finish_reason", False),
            num_input_tokens=values.flag("return_num_input_tokens", False),
            num_output_tokens=values.flag("return_num_output_tokens", False),
            logprobs=values.flag("return_logprobs", False),
            prompt_logprobs=values.flag("return_prompt_logprobs", False),
            top_logprobs=values.integer("top_logprobs", 0, 0, 0, MOST_TOP_LOGPROBS),
        )

    @property
    def scores(self) -> bool:
        """Whether log probabilities are wanted that only trtforge's own engine channel carries."""
        return self.prompt_logprobs or self.top_logprobs > 0

    def engine_inputs(self) -> dict[str, NDArray[Any]]:
        """The engine's inputs that answer these options."""
        inputs: dict[str, NDArray[Any]] = {}
        if self.logprobs:
            inputs["return_log_probs"] = np.array([[True]])
        if self.prompt_logprobs:
            inputs["return_prompt_logprobs"] = np.array([[True]])
        if self.top_logprobs:
            inputs["top_logprobs"] = np.array([[self.top_logprobs]], dtype=np.int32)
        return inputs
