"""Checks the tensors of an inference request: counts, shapes, and sizes against its body."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from trtforge.serve.front.json_body import json_type, parse_object, printable
from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.refusal import Refusal, refuse

_DATATYPES = frozenset(
    "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BF16 BYTES".split()  # noqa: SIM905
)
_RANGES = {
    **{f"INT{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
"""Smallest and largest number of each type: Triton silently wraps other numbers around."""
_SHARED_MEMORY = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")


def check_infer(body: bytes, header_length: int | None, limits: FrontLimits, *, shared_memory: bool) -> None:
    """Check the body of `/infer`. `header_length`: bytes of JSON before the binary tensors, None if all is JSON.

    Raises Refusal (400, 403, 413) naming the tensor.
    """
    if header_length is None:
        header_length = len(body)
    elif not 0 < header_length <= len(body):
        refuse(f"Inference-Header-Content-Length is {header_length}, the body has {len(body)} bytes")
    document = parse_object(body[:header_length], limits)
    _parameters(document, limits)
    inputs = _tensors(document, "inputs", limits)
    outputs = _tensors(document, "outputs", limits)
    if not inputs:
        refuse("inputs is missing or empty")
    given = [_parameters(one, limits) for one in (*inputs, *outputs)]
    if not shared_memory and any(name in parameters for parameters in given for name in _SHARED_MEMORY):
        raise Refusal(HTTPStatus.FORBIDDEN, "shared memory is closed on this server")
    for output, parameters in zip(outputs, given[len(inputs) :], strict=True):
        if "classification" in parameters:  # on a text output it crashes Triton before 25.07
            refuse(f"output {printable(output['name'])}: classification is not supported")
    binary = sum(_check_input(one, limits) for one in inputs)
    if binary != len(body) - header_length:
        refuse(f"binary_data_size adds up to {binary} bytes, {len(body) - header_length} follow the JSON")


def check_generate(body: bytes, limits: FrontLimits) -> Mapping[str, list[int]]:
    """Check the body of `/generate` and `/generate_stream`. Raises Refusal (400, 413).

    Returns the whole numbers beyond INT32 by input, for `check_numbers`.
    """
    document = parse_object(body, limits)
    _check_members("the request", document, limits)
    _parameters(document, limits)
    return {name: numbers for name, value in document.items() if (numbers := _beyond(value, "INT32"))}


def check_numbers(numbers: Mapping[str, list[int]], metadata: bytes, limits: FrontLimits) -> None:
    """Check numbers against the types of a model's inputs. Raises Refusal (400) for a number out of its type's range.

    `metadata`: Triton's answer about the model; any other answer has no types.
    """
    try:
        described = parse_object(metadata, limits)["inputs"]
        types = {each["name"]: each["datatype"] for each in described}
    except (Refusal, LookupError, TypeError):
        return
    for name, given in numbers.items():
        _check_whole(name, given, types.get(name))


def _check_whole(name: str, value: object, datatype: object) -> None:
    """Check the whole numbers in `value` if the type is an integer type."""
    if isinstance(datatype, str) and datatype in _RANGES and (wrong := _beyond(value, datatype)):
        low, high = _RANGES[datatype]
        refuse(f"{printable(name)} is {wrong[0]}; it must be a whole number from {low} to {high}")


def _beyond(value: object, datatype: str) -> list[int]:
    """The whole numbers in nested arrays, or the single number, that are out of the type's range."""
    low, high = _RANGES[datatype]
    found, left = [], [value]
    while left:
        match left.pop():
            case bool():
                continue
            case int(number) if not low <= number <= high:
                found.append(number)
            case list(values):
                left.extend(values)
    return found


def _tensors(document: dict[str, Any], key: str, limits: FrontLimits) -> list[dict[str, Any]]:
    tensors = document.get(key, [])
    if not isinstance(tensors, list):
        refuse(f"{key} must be an array, not {json_type(tensors)}")
    if len(tensors) > limits.tensors:
        refuse(f"{key} has {len(tensors)} tensors, at most {limits.tensors} are accepted")
    for tensor in tensors:
        if not isinstance(tensor, dict):
            refuse(f"each of {key} must be an object, not {json_type(tensor)}")
        if not isinstance(tensor.get("name"), str):
            refuse(f"one of {key} has no name")
    names = [tensor["name"] for tensor in tensors]
    if len(set(names)) < len(names):
        refuse(f"{key} names a tensor twice")
    return tensors


def _check_input(tensor: dict[str, Any], limits: FrontLimits) -> int:
    """Check an input; returns the size of its binary data in bytes."""
    name, shape, datatype = printable(tensor["name"]), tensor.get("shape"), tensor.get("datatype")
    if not isinstance(shape, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in shape):
        refuse(f"input {name}: shape must be an array of integers")
    if len(shape) > limits.dimensions:
        refuse(f"input {name}: shape has {len(shape)} dimensions, at most {limits.dimensions} are accepted")
    if any(one < 0 for one in shape):
        refuse(f"input {name}: shape {shape} has a negative dimension")
    if math.prod(shape) > limits.elements:
        refuse(f"input {name}: shape {shape} has more than {limits.elements} elements")
    if not isinstance(datatype, str) or datatype not in _DATATYPES:
        refuse(f"input {name}: datatype must be one of {', '.join(sorted(_DATATYPES))}")
    parameters = _parameters(tensor, limits)
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in tensor and not any(one in parameters for one in _SHARED_MEMORY):
            refuse(f"input {name} has no data")
        _check_whole(tensor["name"], tensor.get("data"), datatype)
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= limits.binary_bytes:
        refuse(f"input {name}: binary_data_size must be an integer from 0 to {limits.binary_bytes}")
    return size


def _parameters(holder: dict[str, Any], limits: FrontLimits) -> dict[str, Any]:
    parameters = holder.get("parameters", {})
    if not isinstance(parameters, dict):
        refuse(f"parameters must be an object, not {json_type(parameters)}")
    _check_members("parameters", parameters, limits)
    return parameters


def _check_members(what: str, found: dict[str, Any], limits: FrontLimits) -> None:
    if len(found) > limits.members:
        refuse(f"{what} has {len(found)} names, at most {limits.members} are accepted")
