"""Tensors of `/infer`: each is named in what is said of it."""

import json
from typing import Any

import pytest

from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.refusal import Refusal
from trtforge.serve.front.tensors import check_generate, check_infer, check_numbers

GOOD: dict[str, Any] = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
MANY = {f"name{number}": 1 for number in range(129)}


def check(document: object, binary: bytes = b"", *, shared: bool = False, length: int | None = None) -> None:
    body = json.dumps(document).encode()
    header = length if length is not None else (len(body) if binary else None)
    check_infer(body + binary, header, FrontLimits(), shared_memory=shared)


def test_json_and_binary_tensors_are_accepted() -> None:
    check({"inputs": [GOOD], "outputs": [{"name": "text_output"}]})
    binary = {"name": "ids", "shape": [2], "datatype": "INT32", "parameters": {"binary_data_size": 8}}
    check({"inputs": [binary, GOOD]}, b"\0" * 8)


def test_classes_of_an_output_are_refused() -> None:
    with pytest.raises(Refusal) as caught:
        check({"inputs": [GOOD], "outputs": [{"name": "ids"}, {"name": "text", "parameters": {"classification": 2}}]})
    assert (caught.value.status, str(caught.value)) == (400, "output 'text': classification is not supported")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": None}, "one of inputs has no name"),
        ({"shape": None}, "input 'text_input': shape must be an array of integers"),
        ({"shape": [True]}, "shape must be an array of integers"),
        ({"shape": [1.5]}, "shape must be an array of integers"),
        ({"shape": [-1, 1]}, "input 'text_input': shape [-1, 1] has a negative dimension"),
        ({"shape": [2**40, 2**40]}, "has more than 4194304 elements"),
        ({"shape": [1] * 9}, "input 'text_input': shape has 9 dimensions, at most 8"),
        ({"datatype": "STRING"}, "input 'text_input': datatype must be one of"),
        ({"datatype": ["INT32"]}, "input 'text_input': datatype must be one of"),
        ({"parameters": []}, "parameters must be an object, not an array"),
        ({"parameters": {"binary_data_size": -1}}, "binary_data_size must be an integer from 0"),
        ({"parameters": {"binary_data_size": True}}, "binary_data_size must be an integer from 0"),
        ({"parameters": {"binary_data_size": 2**63}}, "binary_data_size must be an integer from 0"),
        ({"parameters": {"binary_data_size": 9}}, "binary_data_size adds up to 9 bytes, 0 follow the JSON"),
    ],
)
def test_a_wrong_input_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal) as caught:
        check({"inputs": [GOOD | change]})
    assert caught.value.status == 400
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("datatype", "data", "said"),
    [
        ("INT32", [[2**31]], "'ids' is 2147483648; it must be a whole number from -2147483648 to 2147483647"),
        ("INT32", [-(2**31) - 1], "'ids' is -2147483649; it must be a whole number from -2147483648"),
        ("UINT64", [5, -1], "'ids' is -1; it must be a whole number from 0 to 18446744073709551615"),
        ("INT8", [[[128]]], "'ids' is 128; it must be a whole number from -128 to 127"),
        ("INT32", [2**31 - 1, -(2**31)], None),
        ("UINT64", [2**64 - 1], None),
        ("FP32", [2**40], None),
        ("BOOL", [True], None),
    ],
)
def test_a_number_that_its_type_does_not_hold_is_refused(datatype: str, data: list[Any], said: str | None) -> None:
    """Triton would take it modulo the type's size."""
    document = {"inputs": [{"name": "ids", "shape": [1, len(data)], "datatype": datatype, "data": data}]}
    generated = json.dumps({"ids": data}).encode()
    metadata = json.dumps({"inputs": [{"name": "ids", "datatype": datatype}]}).encode()
    if said is None:
        check(document)
        check_numbers(check_generate(generated, FrontLimits()), metadata, FrontLimits())
        return
    with pytest.raises(Refusal) as caught:
        check(document)
    assert said in caught.value.message
    if datatype == "INT32":
        with pytest.raises(Refusal) as caught:
            check_numbers(check_generate(generated, FrontLimits()), metadata, FrontLimits())
        assert said in caught.value.message


@pytest.mark.parametrize("data", [[2**33, 2**31], [2**31, 2**33], [2**31, -(2**40)]])
def test_each_number_of_an_input_is_checked(data: list[int]) -> None:
    metadata = json.dumps({"inputs": [{"name": "ids", "datatype": "UINT32"}]}).encode()
    with pytest.raises(Refusal, match="it must be a whole number from 0 to 4294967295"):
        check_numbers(check_generate(json.dumps({"ids": data}).encode(), FrontLimits()), metadata, FrontLimits())


@pytest.mark.parametrize("metadata", [b"", b"{}", b"[]", b'{"inputs": 5}', b'{"inputs": [{"name": "other"}]}'])
def test_a_model_that_is_not_known_says_nothing_of_types(metadata: bytes) -> None:
    numbers = check_generate(json.dumps({"seed": 2**40, "max_tokens": 5}).encode(), FrontLimits())
    assert numbers == {"seed": [2**40]}
    check_numbers(numbers, metadata, FrontLimits())


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "inputs is missing or empty"),
        ({"inputs": {}}, "inputs must be an array, not an object"),
        ({"inputs": [1]}, "each of inputs must be an object, not a number"),
        ({"inputs": [GOOD, GOOD]}, "inputs names a tensor twice"),
        ({"inputs": [GOOD], "outputs": [{"name": str(i)} for i in range(65)]}, "outputs has 65 tensors, at most 64"),
        ({"inputs": [{k: v for k, v in GOOD.items() if k != "data"}]}, "input 'text_input' has no data"),
        ({"inputs": [GOOD], "parameters": []}, "parameters must be an object, not an array"),
        ({"inputs": [GOOD], "parameters": MANY}, "parameters has 129 names, at most 128 are accepted"),
        ({"inputs": [GOOD | {"parameters": MANY}]}, "parameters has 129 names, at most 128 are accepted"),
    ],
)
def test_a_wrong_request_is_refused(document: object, said: str) -> None:
    with pytest.raises(Refusal) as caught:
        check(document)
    assert said in caught.value.message


@pytest.mark.parametrize("where", ["inputs", "outputs"])
def test_shared_memory_is_closed_unless_opened(where: str) -> None:
    region = {"name": "text_input", "shape": [1], "datatype": "INT32", "parameters": {"shared_memory_region": "x"}}
    document = {"inputs": [region]} if where == "inputs" else {"inputs": [GOOD], "outputs": [region]}
    with pytest.raises(Refusal) as caught:
        check(document)
    assert caught.value.status == 403
    check(document, shared=True)


@pytest.mark.parametrize("length", [0, 100_000])
def test_a_header_length_beyond_the_body_is_refused(length: int) -> None:
    with pytest.raises(Refusal, match="Inference-Header-Content-Length is"):
        check({"inputs": [GOOD]}, length=length)


def test_parameters_of_generate_are_an_object() -> None:
    check_generate(b'{"text_input":"a","parameters":{"id":"x"}}', FrontLimits())
    with pytest.raises(Refusal, match="parameters must be an object, not an array"):
        check_generate(b'{"parameters":[]}', FrontLimits())


def test_what_triton_makes_parameters_of_is_bounded() -> None:
    few = dict(list(MANY.items())[:-1])
    check_generate(json.dumps(few).encode(), FrontLimits())
    check_generate(json.dumps({"parameters": few}).encode(), FrontLimits())
    with pytest.raises(Refusal, match="the request has 129 names, at most 128 are accepted"):
        check_generate(json.dumps(MANY).encode(), FrontLimits())
    with pytest.raises(Refusal, match="parameters has 129 names, at most 128 are accepted"):
        check_generate(json.dumps({"parameters": MANY}).encode(), FrontLimits())
