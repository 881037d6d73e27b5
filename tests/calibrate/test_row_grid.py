"""INT4 with one scale an output: TensorRT-LLM's rounding of what conversion writes has to find the codes again."""

from pathlib import Path

import pytest
import torch

from tests.calibrate.test_compensation import correlated, error, factor_of
from tests.conftest import DEMO_MODEL
from trtforge.calibrate.compensation import Compensated, compensate
from trtforge.calibrate.row_grid import RowGrid
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.recipe import Recipe
from trtforge.formats.calibration import open_calibration
from trtforge.formats.tensor_files import load_tensors
from trtforge.models.transforms import unpack_int4
from trtforge.models.weight_only import holds_part, row_parts
from trtforge.pipeline.stage_configs import calibrate_config
from trtforge.pipeline.stages import needs_calibration
from trtforge.runtime.linears.weight_only import quantize_weight_only

MODULE = "model.layers.0.mlp.down_proj"


def rounded(weight: torch.Tensor, inputs: torch.Tensor, parts: int) -> tuple[RowGrid, Compensated]:
    width, factor = weight.shape[1], factor_of(inputs)
    grid = RowGrid(width, parts).fitted(weight, factor.weights)
    return grid, compensate(weight, torch.ones(width), factor, grid)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_build_finds_the_codes_in_each_part(parts: int, dtype: torch.dtype) -> None:
    weight = torch.randn(12, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    found = rounded(weight, correlated(1, 900, 256), parts)[1]
    steps = found.steps[:, 0]
    stored = ((found.levels + (found.levels == 7)).float() * steps.unsqueeze(1)).to(dtype)
    for part, levels in zip(stored.chunk(parts, dim=1), found.levels.chunk(parts, dim=1), strict=True):
        codes, scales = quantize_weight_only(part, 4)
        assert torch.equal(codes, levels)
        assert torch.equal(scales.float(), steps)


@pytest.mark.parametrize(("parts", "share"), [(1, 0.4), (4, 0.6)])
def test_much_less_error_is_left_than_to_the_nearest(parts: int, share: float) -> None:
    inputs, weight = correlated(2, 900, 256), torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    grid, found = rounded(weight, inputs, parts)
    assert error(weight, found.values, inputs) < share * error(weight, grid.nearest(weight), inputs)


def test_an_output_of_zeros_stays_zero() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    weight[2] = 0
    found = rounded(weight, correlated(3, 400, 64), 1)[1]
    assert not found.levels[2].any()
    assert found.levels[[0, 1, 3]].ne(0).any(dim=1).all()


def test_parts_of_row_parallel_inputs() -> None:
    assert [row_parts(inputs) for inputs in (64, 128, 768, 1024, 11008)] == [1, 2, 8, 8, 8]
    assert holds_part(range(128, 256), 256)
    assert not holds_part(range(32, 64), 256)
    assert holds_part(range(256, 512), 768)  # 3 ranks


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {"samples": 8, "sequence_length": 128}
    config = CalibrateConfig.parse({"format": "int4_wo", "data": data}, "test")
    return calibrate(config, DEMO_MODEL, tmp_path_factory.mktemp("rows") / "calibration").path


def test_ranks_reassemble_to_the_same_codes(calibration: Path, tmp_path: Path) -> None:
    """Each rank's build finds the codes of its columns, with the scale of the whole row."""
    found = open_calibration(calibration)
    assert found.manifest.identity.config["rounding"] == "compensated"
    stored = load_tensors(found.rounded[MODULE].codes.file)
    expected, steps = unpack_int4(stored[f"{MODULE}.codes"]), stored[f"{MODULE}.scales"]
    for tp in (1, 2, 4):
        out = convert(ConvertConfig(quant="int4_wo", tp=tp), DEMO_MODEL, tmp_path / f"tp{tp}", calibration=calibration)
        ranks = [load_tensors(out.path / f"rank{rank}.safetensors") for rank in range(tp)]
        weights = [rank["transformer.layers.0.mlp.proj.weight"] for rank in ranks]
        assert all(torch.equal(quantize_weight_only(weight, 4)[1].float(), steps[:, 0]) for weight in weights)
        assert torch.equal(torch.cat([quantize_weight_only(weight, 4)[0] for weight in weights], dim=1), expected)


def test_without_a_calibration_the_models_weights_are_written(tmp_path: Path) -> None:
    out = convert(ConvertConfig(quant="int4_wo"), DEMO_MODEL, tmp_path / "out").path
    source = load_tensors(DEMO_MODEL / "model.safetensors")
    written = load_tensors(out / "rank0.safetensors")["transformer.layers.0.mlp.proj.weight"]
    assert torch.equal(written, source[f"{MODULE}.weight"])


def test_ranks_with_too_few_columns_are_refused(calibration: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="32 of 256 inputs on a rank are too few for the codes") as caught:
        convert(ConvertConfig(quant="int4_wo", tp=8), DEMO_MODEL, tmp_path / "out", calibration=calibration)
    assert "4 ranks at most" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_the_calibration_is_for_its_format_only(calibration: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="is not needed with --quant int8_wo"):
        convert(ConvertConfig(quant="int8_wo"), DEMO_MODEL, tmp_path / "out", calibration=calibration)
    with pytest.raises(ForgeError, match="was calibrated for int4_wo, not fp8"):
        convert(ConvertConfig(quant="fp8"), DEMO_MODEL, tmp_path / "out", calibration=calibration)


def test_rounding_to_the_nearest_is_not_calibrated(tmp_path: Path) -> None:
    config = CalibrateConfig.parse({"format": "int4_wo", "rounding": "nearest"}, "test")
    with pytest.raises(UsageError, match="--rounding nearest of int4_wo needs no calibration"):
        calibrate(config, DEMO_MODEL, tmp_path / "calibration")


@pytest.mark.parametrize(
    ("quantization", "compensated"),
    [
        ({}, False),
        ({"rounding": "compensated"}, True),
        ({"calibration": {"data": "builtin:stdlib"}}, True),
        ({"calibration": {"samples": 4}}, False),
        ({"calibration": {"data": "builtin:stdlib"}, "rounding": "nearest"}, False),
    ],
)
def test_a_recipe_with_calibration_data_compensates(quantization: dict[str, object], *, compensated: bool) -> None:
    values = {"name": "wo", "model": {"source": "m"}, "quantization": {"format": "int4_wo", **quantization}}
    recipe = Recipe.parse(values, "test")
    assert needs_calibration(recipe, quantized=False) is compensated
    assert calibrate_config(recipe).format == ("int4_wo" if compensated else "none")
