"""gRPC messages for Triton's models: requests from named tensors, answers as text."""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

PROMPTS = (
    "The function returns a new",
    "Return the number of",
    "A dictionary is",
    "If the file does not exist,",
    "Changed in version 3.8:",
    "The following example shows how to",
    "class Thread represents",
    "Raises ValueError if",
)
"""Few, so that each one's answer can be known before."""

_CODE_WORD = re.compile(
    r"(UNAVAILABLE|INVALID_ARGUMENT|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|CANCELLED|INTERNAL|NOT_FOUND|UNIMPLEMENTED): "
)
_NEVER_SAID = ("<class", "Traceback", "/site-packages/", " object at 0x", "/dev/shm", "model_repo_templates", '.py"')
_SERVER_PATH = re.compile(r"(?<![\w/])/(?:tmp|home|root|usr|opt|var|work|etc|proc)/[\w.]+")


@dataclass(frozen=True)
class Input:
    """One tensor as it goes over the wire."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True)
class Reply:
    """One response of a stream. `text` None: a response without text; `error` empty: none."""

    text: str | None
    error: str
    final: bool


def numbers(dtype: str, shape: tuple[int, ...], *values: float) -> Input:
    """A tensor of numbers; `dtype` as Triton names it."""
    letter = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP64": "d", "FP16": "e", "BOOL": "?"}[dtype]
    return Input(dtype, shape, struct.pack(f"<{len(values)}{letter}", *values))


def strings(shape: tuple[int, ...], *values: bytes) -> Input:
    """A tensor of byte strings, each after its length."""
    return Input("BYTES", shape, b"".join(struct.pack("<I", len(value)) + value for value in values))


def message(model: str, inputs: Mapping[str, Input], request_id: str = "") -> Any:
    """A ModelInferRequest."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, given in inputs.items():
        tensor = request.inputs.add(name=name, datatype=given.dtype)
        tensor.shape.extend(given.shape)
        request.raw_input_contents.append(given.raw)
    return request


def text_inputs(prompt: str, max_tokens: int, *, stream: bool = True) -> dict[str, Input]:
    """The tensors of a text request."""
    return {
        "text_input": strings((1, 1), prompt.encode()),
        "max_tokens": numbers("INT32", (1, 1), max_tokens),
        "stream": numbers("BOOL", (1, 1), stream),
    }


def engine_inputs(ids: tuple[int, ...], max_tokens: int) -> dict[str, Input]:
    """The tensors of an engine request."""
    return {
        "input_ids": numbers("INT32", (1, len(ids)), *ids),
        "input_lengths": numbers("INT32", (1, 1), len(ids)),
        "request_output_len": numbers("INT32", (1, 1), max_tokens),
    }


def text_request(prompt: str, max_tokens: int, model: str = "ensemble", *, stream: bool = True) -> Any:
    """A text request."""
    return message(model, text_inputs(prompt, max_tokens, stream=stream))


def outputs_of(response: Any) -> dict[str, bytes]:
    """A ModelInferResponse's tensors as raw bytes."""
    return {
        tensor.name: raw for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False) if raw
    }


def reply_of(response: Any) -> Reply:
    """What a ModelStreamInferResponse says."""
    raw = outputs_of(response.infer_response).get("text_output")
    final = response.infer_response.parameters["triton_final_response"].bool_param
    return Reply(None if raw is None else raw[4:].decode(errors="replace"), response.error_message, final)


def is_refusal(error: str) -> bool:
    """Whether an error begins with a code word, as every refusal does."""
    return _CODE_WORD.match(error) is not None


def leaks(text: str) -> list[str]:
    """Paths of the server and representations of Python objects in a text that goes to clients."""
    return [part for part in _NEVER_SAID if part in text] + _SERVER_PATH.findall(text)
