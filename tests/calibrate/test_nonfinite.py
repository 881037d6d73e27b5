"""Weights and activations that are NaN or infinite end a calibration with an error: nothing is written."""

import math
from pathlib import Path

import pytest
import torch

from tests.calibrate.test_stage import SHAPE, config, ids
from tests.conftest import Edit, MakeHf
from trtforge.calibrate.layer import nonfinite_activations
from trtforge.calibrate.stage import calibrate
from trtforge.core.errors import ForgeError

__all__ = ["ids"]


@pytest.mark.parametrize("quant", ["fp8", "int4_awq", "int8_sq"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight(make_hf: MakeHf, ids: Path, tmp_path: Path, edit_tensors: Edit, quant: str, value: float) -> None:
    source, name = make_hf(**SHAPE), "model.layers.1.mlp.up_proj"
    edit_tensors(source, lambda tensors: tensors[f"{name}.weight"].view(-1)[3:4].fill_(value))
    with pytest.raises(ForgeError, match=rf"model\.safetensors: {name}\.weight holds NaN or infinity"):
        calibrate(config(ids, quant), source, tmp_path / "calibration")
    assert not list(tmp_path.glob("*calibration*"))


@pytest.mark.parametrize("quant", ["fp8", "int4_awq", "int8_sq"])
def test_activations(make_hf: MakeHf, ids: Path, tmp_path: Path, edit_tensors: Edit, quant: str) -> None:
    source = make_hf(**SHAPE)
    edit_tensors(source, lambda tensors: tensors["model.layers.1.input_layernorm.weight"].fill_(3e38))
    with pytest.raises(ForgeError, match=r"an input of model\.layers\.1\.self_attn\.q_proj is NaN or infinite"):
        calibrate(config(ids, quant), source, tmp_path / "calibration")
    assert not list(tmp_path.glob("*calibration*"))


def test_activations_that_overflow(make_hf: MakeHf, ids: Path, tmp_path: Path, edit_tensors: Edit) -> None:
    source = make_hf(**SHAPE)
    edit_tensors(source, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(1e38))
    with pytest.raises(ForgeError, match=r"an input of model\.layers\.\d\.\S+ is NaN or infinite.* float32") as caught:
        calibrate(config(ids, "fp8"), source, tmp_path / "calibration")
    assert "other data" in caught.value.hint


def test_keys_and_values(make_hf: MakeHf, ids: Path, tmp_path: Path, edit_tensors: Edit) -> None:
    source = make_hf(**SHAPE)
    edit_tensors(source, lambda tensors: tensors["model.layers.0.self_attn.v_proj.weight"].fill_(3e38))
    with pytest.raises(ForgeError, match=r"layers\.0|layer 0"):
        calibrate(config(ids, "none", kv_cache="int8"), source, tmp_path / "calibration")
    assert not list(tmp_path.glob("*calibration*"))


def test_keys_and_values_of_zero(make_hf: MakeHf, ids: Path, tmp_path: Path, edit_tensors: Edit) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in "kv":
            tensors[f"model.layers.1.self_attn.{name}_proj.weight"].zero_()

    source = make_hf(**SHAPE)
    edit_tensors(source, change)
    with pytest.raises(ForgeError, match="all keys and values of layer 1 are zero"):
        calibrate(config(ids, "none", kv_cache="int8"), source, tmp_path / "calibration")


def test_float16_has_a_way_out() -> None:
    error = nonfinite_activations("it", torch.float16)
    assert error.message == "it is NaN or infinite: the model overflows float16, or its weights are damaged"
    assert "--device cpu" in error.hint
