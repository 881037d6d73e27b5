"""The messages of Triton's gRPC inference calls, for images that have grpcio and protobuf but no tritonclient.

Names and numbers of the fields: grpc_service.proto (triton-inference-server/common), package `inference`. Only fields
that clients of the engine model need are described; protobuf skips the others.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

SERVICE = "/inference.GRPCInferenceService/"
_PACKAGE = "trtforge.inference"
_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "bool": _Field.TYPE_BOOL,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "InferParameter": {"bool_param": (1, "bool"), "int64_param": (2, "int64"), "string_param": (3, "string")},
    "Parameter": {"key": (1, "string"), "value": (2, "InferParameter")},
    "InputTensor": {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "int64[]")},
    "RequestedOutput": {"name": (1, "string")},
    "OutputTensor": {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "int64[]")},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "id": (3, "string"),
        "parameters": (4, "Parameter[]"),
        "inputs": (5, "InputTensor[]"),
        "outputs": (6, "RequestedOutput[]"),
        "raw_input_contents": (7, "bytes[]"),
    },
    "ModelInferResponse": {
        "parameters": (4, "Parameter[]"),
        "outputs": (5, "OutputTensor[]"),
        "raw_output_contents": (6, "bytes[]"),
    },
    "ModelStreamInferResponse": {"error_message": (1, "string"), "infer_response": (2, "ModelInferResponse")},
}
"""Number and kind of each message's fields; `[]`: repeated. A map is encoded as repeated entries of key and value."""

_DTYPES: Mapping[str, str] = {
    "BOOL": "?",
    "UINT8": "u1",
    "INT32": "i4",
    "INT64": "i8",
    "UINT64": "u8",
    "FP16": "f2",
    "FP32": "f4",
}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


def _messages() -> Mapping[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="trtforge_inference.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            each = message.field.add(name=field, number=number)
            base = kind.removesuffix("[]")
            each.label = _Field.LABEL_REPEATED if kind.endswith("[]") else _Field.LABEL_OPTIONAL
            if base in _KINDS:
                each.type = _KINDS[base]
            else:
                each.type, each.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _messages()
ModelInferRequest: Any = _CLASSES["ModelInferRequest"]
ModelInferResponse: Any = _CLASSES["ModelInferResponse"]
ModelStreamInferResponse: Any = _CLASSES["ModelStreamInferResponse"]


def infer_request(
    model: str,
    request_id: str,
    inputs: Mapping[str, NDArray[Any]],
    outputs: list[str],
    bfloat16: Collection[str] = (),
    parameters: Mapping[str, str] | None = None,
) -> Any:
    """A ModelInferRequest that asks for a marked final response, even an empty one.

    `bfloat16`: inputs that are sent in this type, which numpy does not have. `parameters`: of the request.
    """
    request = ModelInferRequest(model_name=model, id=request_id)
    request.parameters.add(key="triton_enable_empty_final_response").value.bool_param = True
    for name, text in (parameters or {}).items():
        request.parameters.add(key=name).value.string_param = text
    for name, value in inputs.items():
        if name in bfloat16:
            request.inputs.add(name=name, datatype="BF16", shape=value.shape)
            request.raw_input_contents.append(_bfloat16(value).tobytes())
            continue
        request.inputs.add(name=name, datatype=_NAMES.get(value.dtype, "BYTES"), shape=value.shape)
        request.raw_input_contents.append(_raw(value))
    for name in outputs:
        request.outputs.add(name=name)
    return request


def arrays_of(response: Any) -> dict[str, NDArray[Any]]:
    """The numeric tensors of a ModelInferResponse, by name."""
    return {
        tensor.name: np.frombuffer(raw, dtype=_DTYPES[tensor.datatype]).reshape(tuple(tensor.shape))
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False)
        if tensor.datatype in _DTYPES
    }


def _bfloat16(value: NDArray[Any]) -> NDArray[Any]:
    """The upper halves of float32 values, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(value, dtype="<f4").view("<u4")
    rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _raw(value: NDArray[Any]) -> bytes:
    """Little-endian, row-major; strings are length-prefixed."""
    if value.dtype in _NAMES:
        return np.ascontiguousarray(value).tobytes()
    texts = (item if isinstance(item, bytes) else str(item).encode() for item in value.flat)
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
