"""Calibration and verification on the GPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import MakeHf
from tests.gpu.engines import DEVICE
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.device import UsableDevice
from trtforge.core.progress import Silent
from trtforge.core.recipe import EngineConfig, QuantFormat
from trtforge.formats.hf import open_checkpoint
from trtforge.verify.layers import compare_by_layer

pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WINDOWS = torch.randint(0, 97, (8, 32), generator=torch.Generator().manual_seed(1))


def calibrated(source: Path, quant: QuantFormat, device: UsableDevice, out: Path) -> Path:
    out.mkdir()
    save_file({"input_ids": WINDOWS}, out / "ids.safetensors")
    data = {"data": str(out / "ids.safetensors"), "samples": 8, "sequence_length": 32}
    config = CalibrateConfig.parse({"format": quant, "data": data, "device": device}, "test")
    return calibrate(config, source, out / "calibration").path


def test_largest_magnitudes_are_those_of_the_cpu(make_hf: MakeHf, tmp_path: Path) -> None:
    """The CPU computes in float32, the GPU in the checkpoint's bfloat16."""
    source = make_hf(dtype=torch.bfloat16, **SHAPE)
    found = {
        device: load_file(calibrated(source, "fp8", device, tmp_path / device) / "calibration.safetensors")
        for device in ("cpu", DEVICE)
    }
    assert found[DEVICE].keys() == found["cpu"].keys()
    for name, expected in found["cpu"].items():
        assert torch.allclose(found[DEVICE][name].float(), expected.float(), rtol=0.03, atol=1e-3), name


@pytest.mark.parametrize("quant", ["fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"])
def test_what_the_gpu_calibrates_is_verified_on_it(quant: QuantFormat, make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(dtype=torch.bfloat16, **SHAPE)
    calibration = calibrated(source, quant, DEVICE, tmp_path / "made")
    assert largest_error(source, quant, calibration, tmp_path) < 0.4


@pytest.mark.parametrize("quant", ["none", "fp8_rowwise", "int8_wo", "int4_wo"])
def test_what_needs_no_calibration_is_verified_on_it(quant: QuantFormat, make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(dtype=torch.bfloat16, **SHAPE)
    assert largest_error(source, quant, None, tmp_path) < 0.4


def largest_error(source: Path, quant: QuantFormat, calibration: Path | None, directory: Path) -> float:
    """Of a layer of the model that is converted and compiled for the GPU, against the unquantised one."""
    convert_config = ConvertConfig(quant=quant, dtype="bfloat16")
    checkpoint = convert(convert_config, source, directory / "checkpoint", calibration=calibration).path
    config = EngineConfig(backend="torch", device=DEVICE, compute_dtype="bfloat16", max_seq_len=128)
    engine = compile_engine(config, checkpoint, directory / "engine").path
    windows = WINDOWS[:2].tolist()
    _, errors = compare_by_layer(engine, open_checkpoint(source), windows, Silent(), layers=True)
    return max(layer.error for layer in errors)
