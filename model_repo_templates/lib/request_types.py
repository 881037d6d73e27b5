"""Disaggregated serving through Triton: which phase of a request this server computes, and what it hands on.

As TensorRT-LLM's Triton backend: the parameter `request_type`, and the tensor `context_phase_params` out of the one
server and into the other (triton_backend/inflight_batcher_llm/src/utils.cc, 1.3.0rc3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from input_names import PHASE, REQUEST_TYPE
from input_values import InputValues
from numpy.typing import NDArray
from responder import RequestFailed

from trtforge.core.errors import RequestError
from trtforge.engine_process.context_phase import REQUEST_TYPES, ContextPhase, RequestType, phase_after
from trtforge.engine_process.requests import GenerationRequest

_BOTH, _CONTEXT_ONLY, _GENERATION_ONLY = REQUEST_TYPES


def request_type(given: Mapping[str, object]) -> RequestType:
    """The phases that are asked for. Raises RequestFailed for others than TensorRT-LLM's."""
    kind = given.get(REQUEST_TYPE, _BOTH)
    for known in REQUEST_TYPES:
        if kind == known:
            return known
    raise RequestFailed(f"{REQUEST_TYPE} is {str(kind)[:80]!r}; it must be one of {', '.join(REQUEST_TYPES)}")


def of_type(request: GenerationRequest, kind: RequestType, values: InputValues, item: int) -> GenerationRequest:
    """A request for one phase. Raises RequestFailed if what it brings is not of this type."""
    if kind != _GENERATION_ONLY:
        if PHASE in values:
            raise RequestFailed(f"{values.shown(PHASE)} is for requests of the type {_GENERATION_ONLY} only")
        return replace(request, context_only=True) if kind == _CONTEXT_ONLY else request
    try:
        phase = ContextPhase.decode(values.of_item(PHASE, item).tobytes().rstrip(b"\0"))
    except RequestError as error:
        raise RequestFailed(error.message) from None
    return replace(request, context_phase=phase)


def handed_on(
    request: GenerationRequest, tokens: Sequence[int], log_probs: Sequence[float], top: Sequence[Any]
) -> NDArray[np.uint8]:
    """`context_phase_params` [1, bytes] of a context_only request; see `phase_after`."""
    return np.frombuffer(phase_after(request, tokens, log_probs, top).encode(), np.uint8)[None]
