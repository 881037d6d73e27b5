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
    "priority",
)


@dataclass(frozen=True)
class TextOptions:
    """One request's options. `top_logprobs`: alternatives beside each token; `priority`: None if not given."""

    include_stop_words: bool
    finish_reason: bool
    num_input_tokens: bool
    num_output_tokens: bool
    logprobs: bool
    prompt_logprobs: bool
    top_logprobs: int
    priority: float | None

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
            priority=values.share("priority", 0, None),
        )

    @property
    def by_own_channel(self) -> str | None:
        """An input that is given and that only trtforge's own engine channel carries."""
        given = {
            "return_prompt_logprobs": self.prompt_logprobs,
            "top_logprobs": self.top_logprobs > 0,
            "priority": self.priority is not None,
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
        return inputs
