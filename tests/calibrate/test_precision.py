"""What calibration computes in, and that the artifact says so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import MakeHf
from trtforge.calibrate import precision
from trtforge.calibrate.precision import forward_dtype, search_dtype
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.formats.calibration import open_calibration


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU multiplies bfloat16 faster."""
    monkeypatch.setattr(precision, "_multiplies_bfloat16_faster", lambda: request.param)
    return bool(request.param)


def test_means_of_a_bfloat16_model_come_from_bfloat16_where_that_is_faster(fast: bool) -> None:
    assert forward_dtype("bfloat16", "cpu", means_only=True) == ("bfloat16" if fast else "float32")
    assert forward_dtype("bfloat16", "cpu", means_only=False) == "float32"
    for source in ("float16", "float32", "float64"):
        assert forward_dtype(source, "cpu", means_only=True) == "float32"
    assert [forward_dtype(source, "cuda", means_only=True) for source in ("float16", "bfloat16", "float32")] == [
        "float16", "bfloat16", "float16",
    ]  # fmt: skip
    assert search_dtype("cpu") == ("bfloat16" if fast else "float32")
    assert search_dtype("cuda") == "float32"


@pytest.mark.parametrize(
    ("changes", "forward", "search"),
    [
        ({"format": "int4_awq"}, "bfloat16", "bfloat16"),
        ({"format": "int4_awq", "kv_cache": "fp8"}, "float32", "bfloat16"),
        ({"format": "w4a8_awq"}, "float32", "bfloat16"),
        ({"format": "int8_sq"}, "float32", None),
        ({"format": "fp8"}, "float32", None),
        ({"format": "nvfp4"}, "float32", "bfloat16"),
    ],
)
def test_only_what_becomes_a_scale_as_it_is_takes_float32(
    make_hf: MakeHf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    forward: str,
    search: str | None,
) -> None:
    monkeypatch.setattr(precision, "_multiplies_bfloat16_faster", lambda: True)
    source = make_hf(dtype=torch.bfloat16, hidden_size=128, intermediate_size=128)
    save_file({"input_ids": torch.arange(48).view(2, 24)}, tmp_path / "ids.safetensors")
    data = {"data": str(tmp_path / "ids.safetensors"), "samples": 2, "sequence_length": 24}
    config = CalibrateConfig.parse({**changes, "data": data}, "test")
    found = calibrate(config, source, tmp_path / "out")
    assert found.manifest.identity.config["forward_dtype"] == forward
    assert found.manifest.identity.config["search_dtype"] == search
    assert all(tensor.dtype is torch.float32 for tensor in open_calibration(tmp_path / "out").tensors.values())


def test_another_arithmetic_is_another_calibration(
    make_hf: MakeHf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_hf(dtype=torch.bfloat16, hidden_size=128, intermediate_size=128)
    save_file({"input_ids": torch.arange(48).view(2, 24)}, tmp_path / "ids.safetensors")
    data = {"data": str(tmp_path / "ids.safetensors"), "samples": 2, "sequence_length": 24}
    config = CalibrateConfig.parse({"format": "int4_awq", "data": data}, "test")
    digests = set()
    for fast in (True, False):
        monkeypatch.setattr(precision, "_multiplies_bfloat16_faster", lambda fast=fast: fast)
        digests.add(calibrate(config, source, tmp_path / str(fast)).manifest.identity.digest)
    assert len(digests) == 2
