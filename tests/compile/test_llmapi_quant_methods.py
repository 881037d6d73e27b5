"""Quantised Hugging Face checkpoints for the LLM API: what a release does not read is refused before it is linked."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compile.test_llmapi_plan import FP8_SOURCE, hugging_face_plan
from tests.conftest import DEMO_MODEL
from tests.quantized import AWQ, GPTQ, compressed
from trtforge.core.errors import ForgeError
from trtforge.formats.quantization_values import ORIGINAL

CONVERT = "Convert it and compile the checkpoint: `trtforge convert "
ROWS = compressed("float-quantized", "channel", "token")
STATIC = compressed("float-quantized", "tensor", "tensor")
W8A8: dict[str, Any] = {  # activations by token, which trtforge does not read
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
NVFP4 = compressed("nvfp4-pack-quantized", "tensor_group", "tensor_group")


@pytest.mark.parametrize(
    ("values", "target", "hint"),
    [
        (AWQ, "1.2.1", CONVERT),
        (AWQ, "1.3.0", CONVERT),
        (GPTQ, "1.3.0", CONVERT),
        (GPTQ | {"desc_act": True}, "1.3.0", ORIGINAL),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "1.3.0", ORIGINAL),
        ({"quant_method": "hqq"}, "1.3.0", ORIGINAL),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "1.2.1", CONVERT),
        (ROWS, "1.2.1", CONVERT),
        (STATIC, "1.3.0", CONVERT),
        (compressed("pack-quantized", "group", None), "1.3.0", CONVERT),
        (W8A8, "1.3.0", ORIGINAL),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "1.2.1", CONVERT),
    ],
    ids=lambda value: value.get("format", value["quant_method"]) if isinstance(value, dict) else None,
)
def test_a_quantisation_that_the_release_does_not_read_is_refused(
    tmp_path: Path, values: dict[str, Any], target: str, hint: str
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": values}))
    with pytest.raises(ForgeError, match=f"is quantised .* TensorRT-LLM {target} is not known to read") as refused:
        hugging_face_plan(tmp_path, tensorrt_llm=target)
    assert refused.value.hint.startswith(hint)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(FP8_SOURCE))  # which it reads instead
    assert hugging_face_plan(tmp_path, tensorrt_llm=target)["warnings"] == []


@pytest.mark.parametrize(("values", "late"), [(ROWS, False), (NVFP4, True)])
def test_schemes_of_compressed_tensors_that_1_3_reads(tmp_path: Path, values: dict[str, Any], late: bool) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": values}))
    warnings = hugging_face_plan(tmp_path, tensorrt_llm="1.3.0")["warnings"]
    expected = f"{tmp_path} is quantised (compressed-tensors): only late release candidates of TensorRT-LLM 1.3 read "
    assert [warning.startswith(expected) for warning in warnings] == [True] * late
