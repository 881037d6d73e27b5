"""Numbers that no calibration writes are refused when it is read, with tensor and value."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.calibrate.test_stage import SHAPE, config, ids
from tests.conftest import MakeHf
from trtforge.calibrate.stage import calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest, read_manifest, record_of
from trtforge.formats.calibration import open_calibration
from trtforge.formats.calibration_values import require_scales

__all__ = ["ids"]

FILE = Path("calibration.safetensors")
GOOD = {
    "m.input_amax": [2.0],
    "m.weight_amax": [0.5],
    "m.dead_channels": [0.0],
    "m.pre_quant_scale": [1.0, 0.5],
    "m.clip_ratio": [0.5, 1.0],
    "m.alpha": [0.0],
    "m.output_error": [0.0],
    "m.nearest_error": [0.0],
    "m.tokens": [0.0],
    "m.input_channel_amax": [2.0, 0.0],
    "m.weight_column_amax": [0.5, 0.0],
    "layers.0.kv_amax": [3.0],
    "layers.0.kv_scale": [0.02],
}


def tensors(**changed: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in (GOOD | changed).items()}


def test_what_calibration_writes_is_accepted() -> None:
    require_scales(FILE, tensors())


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1"])
def test_no_number_and_below_zero(name: str, value: str) -> None:
    values = [*GOOD[name][:-1], float(value)]
    where = name if len(values) == 1 else rf"{name}\[1\]"
    with pytest.raises(ForgeError, match=f"^calibration.safetensors: {where} is {value}, not ") as caught:
        require_scales(FILE, tensors(**{name: values}))
    assert "calibrate again" in caught.value.hint


@pytest.mark.parametrize("name", ["m.input_amax", "m.weight_amax", "m.pre_quant_scale", "layers.0.kv_amax"])
def test_zero_is_no_scale(name: str) -> None:
    with pytest.raises(ForgeError, match=rf"{name}(\[0\])? is 0, not a number above zero"):
        require_scales(FILE, tensors(**{name: [0.0] * len(GOOD[name])}))


def test_zeros_that_the_data_explains() -> None:
    require_scales(FILE, tensors(**{"m.input_amax": [0.0], "m.dead_channels": [2.0]}))
    require_scales(FILE, tensors(**{"m.weight_amax": [0.0], "m.zero_weight": [1.0]}))


def test_ranges() -> None:
    with pytest.raises(ForgeError, match=r"clip_ratio\[0\] is 1.5, not a ratio above 0"):
        require_scales(FILE, tensors(**{"m.clip_ratio": [1.5, 1.0]}))
    with pytest.raises(ForgeError, match=r"alpha is 2, not an exponent from 0 to 1"):
        require_scales(FILE, tensors(**{"m.alpha": [2.0]}))


@pytest.mark.parametrize("kind", ["input_amax", "weight_amax", "pre_quant_scale", "kv_amax"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_convert_refuses_them(make_hf: MakeHf, ids: Path, tmp_path: Path, kind: str, value: float) -> None:
    source = make_hf(**SHAPE, num_hidden_layers=1)
    made = calibrate(config(ids, "w4a8_awq", kv_cache="fp8"), source, tmp_path / "calibration").path
    found = load_file(made / FILE)
    name = next(name for name in found if name.endswith(f".{kind}"))
    found[name][0] = value
    save_file(found, made / FILE)
    manifest = read_manifest(made)
    assert manifest is not None
    Manifest(identity=manifest.identity, files={FILE.name: record_of(made / FILE)}).write(made)

    asked = ConvertConfig(quant="w4a8_awq", kv_cache="fp8")
    with pytest.raises(ForgeError, match=rf"{name}(\[0\])? is {value:g}, not "):
        convert(asked, source, tmp_path / "out", calibration=made)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("damage", ["scale", "shape"])
def test_codes_that_no_calibration_writes_are_refused(make_hf: MakeHf, ids: Path, tmp_path: Path, damage: str) -> None:
    source = make_hf(**SHAPE, num_hidden_layers=1)
    made = calibrate(config(ids, "int4_awq"), source, tmp_path / "calibration").path
    file = made / "codes-00000.safetensors"
    found, name = load_file(file), "model.layers.0.mlp.down_proj.scales"
    if damage == "scale":
        found[name][3, 1] = 0.0
    else:
        found[name] = found[name][:, :1].clone()
    save_file(found, file)
    manifest = read_manifest(made)
    assert manifest is not None
    files = {path.name: record_of(path) for path in (made / FILE, file)}
    Manifest(identity=manifest.identity, files=files).write(made)

    with pytest.raises(ForgeError) as refused:
        convert(ConvertConfig(quant="int4_awq"), source, tmp_path / "out", calibration=made)
    expected = {
        "scale": f"{file}: {name} holds a scale that is not a finite number above zero",
        "shape": f"{file}: {name} has the shape [128, 1], not [128, 2]",
    }
    assert refused.value.message == expected[damage]
    assert "calibrate again with --force" in refused.value.hint
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("method", ["compensated", "nearest"])
def test_int4_weights_of_zeros_are_calibrated_and_converted(
    make_hf: MakeHf, ids: Path, tmp_path: Path, method: str
) -> None:
    """The down projection's inputs are zero too."""
    source = make_hf(**SHAPE, num_hidden_layers=1)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].zero_()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    made = calibrate(config(ids, "int4_awq", rounding=method), source, tmp_path / "calibration").path
    out = convert(ConvertConfig(quant="int4_awq"), source, tmp_path / "out", calibration=made).path
    rank = load_file(out / "rank0.safetensors")
    assert all(tensor.float().isfinite().all() for tensor in rank.values())
    assert not rank["transformer.layers.0.mlp.gate.weight"].any()
    rounded = open_calibration(made).rounded
    assert len(rounded) == (6 if method == "compensated" else 0)


def test_a_weight_of_zeros_is_calibrated_and_converted(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    source = make_hf(**SHAPE, num_hidden_layers=1)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].zero_()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    made = calibrate(config(ids, "fp8"), source, tmp_path / "calibration").path

    found = open_calibration(made)
    assert found.weight_amax("model.layers.0.mlp.up_proj").item() == 0
    assert found.input_amax("model.layers.0.mlp.down_proj").item() == 0
    out = convert(ConvertConfig(quant="fp8"), source, tmp_path / "out", calibration=made).path
    rank = load_file(out / "rank0.safetensors")
    assert all(tensor.float().isfinite().all() for tensor in rank.values())
