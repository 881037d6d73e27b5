"""Text requests as tensors of KServe v2 gRPC, and responses as pieces."""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from trtforge.gateway.backend import ADAPTER, GUIDE_TYPE, SEEDS, BackendError, ServedModel
from trtforge.gateway.request import Piece, Sampling, TextRequest

PACKAGE_AGAIN = "run `trtforge package` again with this release of trtforge to add it"
_FORMATS = {"INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d", "BOOL": "?"}
_WIDTHS = {"INT32": 32, "UINT32": 32, "INT64": 64, "UINT64": 64}

_Value = str | int | float | bool | bytes | tuple[int, ...] | tuple[str, ...]
_REQUEST_TYPE, _PHASE = _PHASES = "request_type", "context_phase_params"
"""Inputs that a gateway with context servers sets itself."""
_ASKED = (
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
    "return_finish_reason",
    "return_prompt_thought",
)
"""Outputs that every request asks for, if the model has them."""


def infer_request(model: ServedModel, request: TextRequest) -> Any:
    """The ModelInferRequest of a request. Raises BackendError for an input that the model lacks."""
    message = service_pb2.ModelInferRequest(model_name=model.name)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in _inputs(model, request).items():
        datatype = model.inputs.get(name)
        if datatype is None:
            raise BackendError(_missing(model, name), "INTERNAL" if name in _PHASES else "INVALID_ARGUMENT")
        values = value if isinstance(value, tuple | bytes) else (value,)
        message.inputs.add(name=name, datatype=datatype, shape=(1, len(values)))
        message.raw_input_contents.append(values if isinstance(values, bytes) else _raw(datatype, values))
    return message


def piece_of(response: Any) -> Piece | None:
    """The piece in a ModelInferResponse; None for one without tensors, which only marks the end."""
    if not response.outputs:
        return None
    piece = Piece()
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        read = _READERS.get(tensor.name)
        if read is not None:
            read(piece, raw)
    return piece


def _inputs(model: ServedModel, request: TextRequest) -> Mapping[str, _Value]:
    values: dict[str, _Value] = {"max_tokens": request.max_tokens, "stream": request.stream}
    if request.messages is not None:
        values["messages"] = request.messages
    elif isinstance(request.prompt, tuple):
        values["input_ids"] = request.prompt
    else:
        values["text_input"] = request.prompt or ""
    if request.stop:
        values["stop_words"] = request.stop
    if request.sequences > 1:
        values["num_return_sequences"] = request.sequences
    values |= _sampling(model, request.sampling)
    if request.guide is not None:
        values |= {GUIDE_TYPE: request.guide.kind, "guided_decoding_guide": request.guide.text}
    if request.adapter is not None:
        values[ADAPTER] = request.adapter
    for name in _ASKED:
        if name in model.inputs:
            values[name] = True
    if request.logprobs:
        values["return_logprobs"] = True
    if request.prompt_logprobs:
        values["return_prompt_logprobs"] = True
    if request.top_logprobs and (request.logprobs or request.prompt_logprobs):
        values["top_logprobs"] = request.top_logprobs
    if request.request_type != "context_and_generation":
        values[_REQUEST_TYPE] = request.request_type
    if request.context_phase:
        values[_PHASE] = request.context_phase
    return values


def _sampling(model: ServedModel, sampling: Sampling) -> dict[str, _Value]:
    given: dict[str, _Value | None] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "logit_bias": sampling.logit_bias,
        "priority": sampling.priority,
        "cache_salt": sampling.cache_salt,
        "min_p": sampling.min_p,
        "no_repeat_ngram_size": sampling.no_repeat_ngram_size,
        "prompt_ignore_length": sampling.prompt_ignore_length,
        next((name for name in SEEDS if name in model.inputs), SEEDS[0]): sampling.seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def _missing(model: ServedModel, name: str) -> str:
    if name == "messages" and "return_finish_reason" in model.inputs:
        return (
            "this model has no chat template, so it cannot answer chat messages; use /v1/completions, or "
            "`trtforge package` with a tokenizer that has a chat template"
        )
    return f"this model has no input {name}; {PACKAGE_AGAIN}"


def _raw(datatype: str, values: tuple[Any, ...]) -> bytes:
    """Little-endian; strings are length-prefixed."""
    if datatype == "BYTES":
        texts = [str(value).encode() for value in values]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    if datatype not in _FORMATS:
        raise BackendError(f"an input has the data type {datatype}, which the gateway does not send", "INTERNAL")
    if datatype in _WIDTHS:
        values = tuple(_fitting(value, _WIDTHS[datatype], signed=datatype.startswith("I")) for value in values)
    return struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)


def _fitting(value: int, bits: int, *, signed: bool) -> int:
    """The integer with the same lowest `bits` bits; a truncated seed is equally good."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def _text(raw: bytes) -> str:
    return raw[4:].decode(errors="replace")


def _int32(raw: bytes) -> int:
    return int.from_bytes(raw[:4], "little", signed=True)


def _set_text(piece: Piece, raw: bytes) -> None:
    piece.text = _text(raw)


def _set_reason(piece: Piece, raw: bytes) -> None:
    piece.finish_reason = _text(raw)


def _set_prompt_thought(piece: Piece, raw: bytes) -> None:
    piece.prompt_thought = _text(raw)


def _set_inputs(piece: Piece, raw: bytes) -> None:
    piece.input_tokens = _int32(raw)


def _set_outputs(piece: Piece, raw: bytes) -> None:
    piece.output_tokens = _int32(raw)


def _set_cached(piece: Piece, raw: bytes) -> None:
    piece.cached_tokens = _int32(raw)


def _set_sequence(piece: Piece, raw: bytes) -> None:
    piece.sequence = _int32(raw)


def _set_phase(piece: Piece, raw: bytes) -> None:
    piece.context_phase = raw


def _set_logprobs(piece: Piece, raw: bytes) -> None:
    piece.logprobs = json.loads(raw[4:] or b"[]")


def _set_prompt_logprobs(piece: Piece, raw: bytes) -> None:
    piece.prompt_logprobs = json.loads(raw[4:] or b"[]")


_READERS: Mapping[str, Callable[[Piece, bytes], None]] = {
    "text_output": _set_text,
    "finish_reason": _set_reason,
    "prompt_thought": _set_prompt_thought,
    "num_input_tokens": _set_inputs,
    "num_output_tokens": _set_outputs,
    "num_cached_tokens": _set_cached,
    "sequence_index": _set_sequence,
    "logprobs": _set_logprobs,
    "prompt_logprobs": _set_prompt_logprobs,
    _PHASE: _set_phase,
}
