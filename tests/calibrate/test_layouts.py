"""One calibration, several parallel layouts: the ranks together compute the same model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import MixtralConfig

from tests.conftest import DEMO_MODEL
from tests.families import _GQA, _tiny
from tests.runtime.converted import computed, error
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.formats.calibration import open_calibration
from trtforge.formats.corpus import token_windows
from trtforge.formats.tensor_files import load_tensors
from trtforge.models.formats import FORMATS
from trtforge.models.transforms import dequantize_int4, unpack_int4

WINDOWS = [
    list(window)
    for window in token_windows(
        str(DEMO_MODEL / "heldout.txt"), DEMO_MODEL, samples=4, length=128, vocab_size=2048, seed=0
    ).windows
]
SPLITS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp4": {"tp": 4}}


@pytest.mark.parametrize("quant", ["fp8", "int4_awq", "int4_wo", "w4a8_awq", "int8_sq", "nvfp4"])
def test_layouts_agree(quant: str, tmp_path: Path) -> None:
    """Groups of 64, so that tp 4 is legal. Rounded activations amplify the order of sums: there perplexity counts."""
    group = 64 if FORMATS[quant].smoothing == "awq" and not FORMATS[quant].static_activations else 128  # type: ignore[index]
    data = {"samples": 16, "sequence_length": 128}
    config = CalibrateConfig.parse({"format": quant, "group_size": group, "data": data}, "test")
    calibration = calibrate(config, DEMO_MODEL, tmp_path / "calibration").path

    def converted(name: str, **split: int) -> Path:
        settings = ConvertConfig.parse({"quant": quant, **split}, "test")
        return convert(settings, DEMO_MODEL, tmp_path / name, calibration=calibration).path

    expected = computed(converted("tp1"), *WINDOWS)
    for name, split in SPLITS.items():
        if name == "tp4" and quant == "w4a8_awq":
            continue  # whole groups of 128, which this format needs, do not fit 4 ranks
        out = converted(name, **split)
        if FORMATS[quant].static_activations:  # type: ignore[index]
            assert perplexity(computed(out, *WINDOWS)) == pytest.approx(perplexity(expected), rel=5e-4)
        else:
            pairs = zip(computed(out, *WINDOWS), expected, strict=True)
            assert max(error(found, whole) for found, whole in pairs) <= 1e-4


def perplexity(logits: list[Tensor]) -> float:
    """Of the windows."""
    losses = [cross_entropy(own[:-1], torch.tensor(ids[1:])) for own, ids in zip(logits, WINDOWS, strict=True)]
    return float(torch.stack(losses).mean().exp())


def test_compensated_experts_agree_in_every_layout(tmp_path: Path) -> None:
    """Each expert has its own codes, one scale is for all of them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
    model = _tiny(MixtralConfig, **_GQA | sizes, num_local_experts=4, num_experts_per_tok=2)
    model.save_pretrained(tmp_path / "hf")
    ids = torch.randint(0, 128, (8, 64), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    data = {"data": str(tmp_path / "ids.safetensors"), "samples": 8, "sequence_length": 64}
    settings = {"format": "int4_awq", "group_size": 64, "data": data}
    calibration = calibrate(CalibrateConfig.parse(settings, "test"), tmp_path / "hf", tmp_path / "calibration").path
    found, source = open_calibration(calibration), load_tensors(tmp_path / "hf" / "model.safetensors")
    assert sum(".experts." in module for module in found.rounded) == 2 * 4 * 3
    for module, rounded in found.rounded.items():
        codes = load_tensors(rounded.codes.file)
        steps = codes[f"{module}.scales"]
        restored = dequantize_int4(unpack_int4(codes[f"{module}.codes"]), steps) * found.pre_quant_scale(module)
        assert error(restored, source[f"{module}.weight"]) < 0.3, module
    scales = [found.pre_quant_scale(f"model.layers.0.block_sparse_moe.experts.{e}.w1") for e in range(4)]
    assert all(torch.equal(scale, scales[0]) for scale in scales)

    def converted(name: str, **split: int) -> list[Tensor]:
        wanted = ConvertConfig.parse({"quant": "int4_awq", "dtype": "float32", **split}, "test")
        return computed(
            convert(wanted, tmp_path / "hf", tmp_path / name, calibration=calibration).path, *ids[:2].tolist()
        )

    expected = converted("tp1")
    for name, split in {"tp2": {"tp": 2}, "ep2": {"tp": 2, "ep": 2}}.items():
        assert max(error(*pair) for pair in zip(converted(name, **split), expected, strict=True)) <= 1e-4
