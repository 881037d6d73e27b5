"""The error layer by layer: none for a faithful checkpoint at any layout, and the layer that broke by its number."""

from pathlib import Path

import pytest
import torch

from tests.families import TINY
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.progress import Silent
from trtforge.formats.hf import open_checkpoint
from trtforge.verify.layers import compare_by_layer

WINDOWS = [tuple(range(3, 40)), tuple(range(90, 60, -1))]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma2", "mixtral", "deepseek_v2", "qwen3_next"])
def test_faithful_checkpoints_have_no_error_anywhere(tmp_path: Path, name: str) -> None:
    TINY[name]().save_pretrained(tmp_path / "hf")
    out = convert(ConvertConfig(dtype="float32", tp=2, pp=2), tmp_path / "hf", tmp_path / "out").path
    _, errors = compare_by_layer(out, open_checkpoint(tmp_path / "hf"), WINDOWS, Silent(), layers=True)
    assert [layer.layer for layer in errors] == [0, 1, 2, 3]
    assert max(layer.error for layer in errors) < 1e-5


@pytest.mark.parametrize("broken", [0, 2])
def test_the_layer_that_broke_adds_most(tmp_path: Path, broken: int) -> None:
    model = TINY["llama"]()
    model.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        down = model.model.layers[broken].mlp.down_proj.weight
        down.copy_(down.roll(1, dims=0))
    model.save_pretrained(tmp_path / "other")
    out = convert(ConvertConfig(dtype="float32", pp=2), tmp_path / "other", tmp_path / "out").path
    _, errors = compare_by_layer(out, open_checkpoint(tmp_path / "hf"), WINDOWS, Silent(), layers=True)
    assert all(layer.error < 1e-5 for layer in errors[:broken])
    assert max(errors, key=lambda layer: layer.added).layer == broken
    assert errors[broken].error > 0.01
