"""The messages that text models send to an engine model, read and written by tritonclient's own."""

import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2

pytestmark = pytest.mark.usefixtures("library")


def test_a_request_is_what_tritonclient_reads() -> None:
    from kserve_messages import infer_request  # type: ignore[import-not-found]

    inputs = {
        "input_ids": np.array([[5, 6]], dtype=np.int32),
        "seed": np.array([[2**64 - 1]], dtype=np.uint64),
        "temperature": np.array([[0.5]], dtype=np.float32),
        "streaming": np.array([[True]]),
        "guide": np.array([[b"json", b""]], dtype=object),
    }
    request = infer_request("tensorrt_llm", "7", inputs, ["output_ids", "sequence_length"])
    read = service_pb2.ModelInferRequest.FromString(request.SerializeToString())
    assert (read.model_name, read.id) == ("tensorrt_llm", "7")
    assert read.parameters["triton_enable_empty_final_response"].bool_param
    assert [(each.name, each.datatype, list(each.shape)) for each in read.inputs] == [
        ("input_ids", "INT32", [1, 2]),
        ("seed", "UINT64", [1, 1]),
        ("temperature", "FP32", [1, 1]),
        ("streaming", "BOOL", [1, 1]),
        ("guide", "BYTES", [1, 2]),
    ]
    assert [each.name for each in read.outputs] == ["output_ids", "sequence_length"]
    assert np.frombuffer(read.raw_input_contents[0], np.int32).tolist() == [5, 6]
    assert read.raw_input_contents[4] == b"\4\0\0\0json\0\0\0\0"


def test_a_response_of_tritons_is_read() -> None:
    from kserve_messages import ModelStreamInferResponse, arrays_of

    sent = service_pb2.ModelStreamInferResponse()
    ids = np.array([[[1, 2, 3]]], dtype=np.int32)
    sent.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=ids.shape)
    sent.infer_response.raw_output_contents.append(ids.tobytes())
    sent.infer_response.parameters["triton_final_response"].bool_param = True
    read = ModelStreamInferResponse.FromString(sent.SerializeToString())
    assert arrays_of(read.infer_response)["output_ids"].tolist() == ids.tolist()
    assert InferResult(sent.infer_response).as_numpy("output_ids").tolist() == ids.tolist()
    assert [(each.key, each.value.bool_param) for each in read.infer_response.parameters] == [
        ("triton_final_response", True)
    ]
    failed = service_pb2.ModelStreamInferResponse(error_message="no")
    assert ModelStreamInferResponse.FromString(failed.SerializeToString()).error_message == "no"


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    import torch
    from kserve_messages import infer_request

    generator = np.random.default_rng(0)
    values = generator.standard_normal((1, 3, 50)).astype(np.float16)
    values[0, 0, :4] = [0, 65504, -1e-7, np.float16(1.00390625)]
    request = infer_request("tensorrt_llm", "7", {"lora_weights": values}, [], {"lora_weights"})
    read = service_pb2.ModelInferRequest.FromString(request.SerializeToString())
    (sent,) = read.inputs
    assert (sent.name, sent.datatype, list(sent.shape)) == ("lora_weights", "BF16", [1, 3, 50])
    expected = torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.frombuffer(read.raw_input_contents[0], "<u2").tolist() == expected.ravel().tolist()
