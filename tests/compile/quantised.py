"""Tiny models quantised for the LLM API, and the logits that the embedded engine computes of them."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.compile.test_llmapi import IDS
from tests.runtime.converted import computed
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import CalibrationConfig

PROMPT: list[int] = IDS[0, :40].tolist()


def quantised(hf: Path, quant: str, out: Path, **layout: Any) -> Path:
    """The checkpoint of TensorRT-LLM in `out`, calibrated on the token ids beside the model."""
    data = CalibrationConfig(data=str(hf.parent / "ids.safetensors"), samples=8, sequence_length=64)
    cache = layout.get("kv_cache", "none")
    config = CalibrateConfig.model_validate({"format": quant, "kv_cache": cache, "data": data, "rounding": "nearest"})
    calibration = calibrate(config, hf, out.with_name(f"{quant}-{cache}-calibration")).path
    return convert(ConvertConfig.parse({"quant": quant, **layout}, "test"), hf, out, calibration=calibration).path


def computed_in_every_layout(
    hf: Path, quant: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[Tensor]]:
    """The last one of the checkpoints, and the logits of PROMPT by each. Activations are not rounded."""
    for function in ("nvfp4_linear.round_to_nvfp4", "fp8_linear.round_to_e4m3"):
        monkeypatch.setattr(f"trtforge.runtime.linears.{function}", lambda values, scale: values.float() / scale)
    found = []
    for number, layout in enumerate(({}, {"tp": 2}, {"tp": 2, "ep": 2, "pp": 2})):
        made = quantised(hf, quant, directory / f"ck{number}", dtype="float32", **layout)
        found.append(computed(made, PROMPT)[0])
    return made, found
