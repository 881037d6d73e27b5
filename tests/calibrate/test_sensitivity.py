"""Predicted damage of each linear layer, against the damage measured by quantising that layer alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.conftest import DEMO_MODEL
from tests.convert.test_quantized_families import FAMILIES
from trtforge.calibrate.sensitivity import predict_damages
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import GateConfig, QuantFormat
from trtforge.formats.damages import Predicted
from trtforge.formats.shards import read_header
from trtforge.verify.sensitivity import rank_linears


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's."""
    ranks = torch.tensor([one, other]).argsort(dim=1).argsort(dim=1).double()
    return float(torch.corrcoef(ranks)[0, 1])


def both_ways(
    source: Path, quant: QuantFormat, gate: GateConfig, directory: Path, **settings: object
) -> tuple[list[Predicted], list[float], list[float]]:
    """What is predicted, and the predicted and measured damages of the same linear layers."""
    wanted = {"format": quant, "data": {"data": gate.data, "samples": 16, "sequence_length": 128}} | settings
    calibration = calibrate(CalibrateConfig.parse(wanted, "test"), source, directory / "calibration").path
    checkpoint = convert(ConvertConfig(quant=quant), source, directory / "checkpoint", calibration=calibration).path
    measured = {found.modules: found.error for found in rank_linears(checkpoint, source, gate)}
    predicted = list(predict_damages(calibration, source, gate, (quant,)))
    assert {found.modules for found in predicted} == set(measured)
    return predicted, [each.damage[quant] for each in predicted], [measured[each.modules] for each in predicted]


@pytest.mark.parametrize(
    ("quant", "rounding", "least"),
    [
        ("int4_awq", "auto", 0.93),
        ("fp8", "auto", 0.93),
        ("nvfp4", "nearest", 0.93),
        ("nvfp4", "compensated", 0.9),  # its weights depend on the errors of its inputs, which are taken as noise here
    ],
)
def test_the_ranking_is_that_of_measuring(quant: QuantFormat, rounding: str, least: float, tmp_path: Path) -> None:
    gate = GateConfig(data=str(DEMO_MODEL / "heldout.txt"), samples=6, sequence_length=96)
    found, predicted, measured = both_ways(
        DEMO_MODEL, quant, gate, tmp_path, rounding=rounding, data={"samples": 16, "sequence_length": 128}
    )
    assert rank_correlation(predicted, measured) > least
    assert all(0.7 < one / other < 1.4 for one, other in zip(predicted, measured, strict=True))
    shapes = {stored.spec.name: stored.spec.shape for stored in read_header(DEMO_MODEL / "model.safetensors")}
    linears = [shape for name, shape in shapes.items() if name.endswith("_proj.weight")]
    assert sum(each.weights for each in found) == sum(out * inputs for out, inputs in linears)


@pytest.mark.parametrize(("name", "quant"), [("gpt2", "int8_sq"), ("falcon_40b", "w4a8_awq")])
def test_fused_matrices_and_smoothed_inputs_are_predicted_too(name: str, quant: QuantFormat, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[name]()).float().eval().save_pretrained(tmp_path / "hf")
    ids = torch.randint(3, 97, (3, 24), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    gate = GateConfig(data=str(tmp_path / "ids.safetensors"), samples=3, sequence_length=24)
    _, predicted, measured = both_ways(tmp_path / "hf", quant, gate, tmp_path, data={"data": gate.data})
    assert all(0.6 < one / other < 1.6 for one, other in zip(predicted, measured, strict=True)), (predicted, measured)


def test_fp8_is_predicted_from_an_int4_calibration_and_int4_not_from_one_of_fp8(tmp_path: Path) -> None:
    data = {"samples": 4, "sequence_length": 64}
    gate = GateConfig(data=str(DEMO_MODEL / "heldout.txt"), samples=2, sequence_length=64)
    for quant in ("int4_awq", "fp8"):
        calibrate(CalibrateConfig.parse({"format": quant, "data": data}, "test"), DEMO_MODEL, tmp_path / quant)
    both = predict_damages(tmp_path / "int4_awq", DEMO_MODEL, gate, ("int4_awq", "fp8"))
    alone = predict_damages(tmp_path / "fp8", DEMO_MODEL, gate, ("fp8",))
    # Weight-only formats are calibrated in bfloat16, so the largest inputs differ a little.
    assert [each.damage["fp8"] for each in both] == pytest.approx([each.damage["fp8"] for each in alone], rel=0.15)
    assert both[0].damage["int4_awq"] != both[0].damage["fp8"]
    with pytest.raises(ForgeError, match=r"the calibration has no model\.layers\.0\..*pre_quant_scale"):
        predict_damages(tmp_path / "fp8", DEMO_MODEL, gate, ("int4_awq",))
