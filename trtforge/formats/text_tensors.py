"""The tensors of the text models in addition to those of TensorRT-LLM's ensemble.

`return_finish_reason`, `return_num_input_tokens` and `return_num_output_tokens` and their outputs are named as in
Triton's vLLM backend, `return_num_cached_tokens` and `return_prompt_thought` like them, `include_stop_str_in_output` as
in TensorRT-LLM's SamplingParams.
"""

from collections.abc import Sequence
from dataclasses import replace

from trtforge.formats.triton import Direction, Tensor

MESSAGES = "messages"


def _tensor(name: str, dtype: str, *dims: int) -> Tensor:
    return Tensor(name, dtype, dims or (1,), optional=True, scalar=False, ragged=False)


_PHASE = _tensor("context_phase_params", "TYPE_UINT8", -1)
_INPUTS = (
    _tensor(MESSAGES, "TYPE_STRING"),
    _tensor("input_ids", "TYPE_INT32", -1),
    _tensor("logit_bias", "TYPE_STRING"),
    _tensor("include_stop_str_in_output", "TYPE_BOOL"),
    _tensor("return_finish_reason", "TYPE_BOOL"),
    _tensor("return_num_input_tokens", "TYPE_BOOL"),
    _tensor("return_num_output_tokens", "TYPE_BOOL"),
    _tensor("return_num_cached_tokens", "TYPE_BOOL"),
    _tensor("return_prompt_thought", "TYPE_BOOL"),
    _tensor("return_logprobs", "TYPE_BOOL"),
    _tensor("top_logprobs", "TYPE_INT32"),
    _tensor("return_prompt_logprobs", "TYPE_BOOL"),
    _tensor("priority", "TYPE_FP32"),
    _tensor("cache_salt", "TYPE_STRING"),
    _tensor("min_p", "TYPE_FP32"),
    _tensor("no_repeat_ngram_size", "TYPE_INT32"),
    _tensor("prompt_ignore_length", "TYPE_INT32"),
    _tensor("request_type", "TYPE_STRING"),
    _PHASE,
)
_OUTPUTS = (
    _tensor("finish_reason", "TYPE_STRING"),
    _tensor("num_input_tokens", "TYPE_INT32"),
    _tensor("num_output_tokens", "TYPE_INT32"),
    _tensor("num_cached_tokens", "TYPE_INT32"),
    _tensor("prompt_thought", "TYPE_STRING"),
    _tensor("logprobs", "TYPE_STRING"),
    _tensor("prompt_logprobs", "TYPE_STRING"),
    _PHASE,
)


def with_text_tensors(tensors: Sequence[Tensor], direction: Direction, *, chat: bool) -> tuple[Tensor, ...]:
    """A text model's tensors, first TensorRT-LLM's. `chat`: whether the tokenizer has a chat template.

    `text_input` becomes optional, because the prompt may also be messages or token ids.
    """
    added = _INPUTS if direction == "inputs" else _OUTPUTS
    names = {tensor.name for tensor in tensors}
    own = [replace(each, optional=True) if each.name == "text_input" else each for each in tensors]
    return (*own, *(each for each in added if each.name not in names and (chat or each.name != MESSAGES)))
