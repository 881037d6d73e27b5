"""Scales of the KV cache, from the largest magnitude or by the error of attention."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from tests.conftest import DEMO_MODEL
from trtforge.calibrate.kv_scale import largest_scale, search_scale
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import GateConfig, KvCacheFormat
from trtforge.formats.calibration import FILE
from trtforge.reference.streaming import CacheObserver, LoadedLayer
from trtforge.verify.stage import verify

GATE = GateConfig(data=str(DEMO_MODEL / "heldout.txt"), samples=8, sequence_length=128)


class Attention(nn.Module):
    """One head over `cache`; its queries, keys and values are the thirds of the hidden states."""

    def __init__(self, cache: CacheObserver) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = hidden.chunk(3, dim=-1)
        return functional.scaled_dot_product_attention(query, *self.cache.update(key, value, 0), is_causal=True)


def searched(hidden: Tensor, quant: KvCacheFormat) -> tuple[float, float]:
    """The scale that is found for these hidden states, and that of the largest magnitude."""
    cache = CacheObserver(observes=True)
    module = Attention(cache)
    layer = LoadedLayer(0, module, lambda batch, states: cast(Tensor, module(states)), cast(Any, None), 1)
    module(hidden)
    amax = cache.take()
    scale = search_scale(layer, module, [hidden], cache, amax, quant)
    assert cache.rounded is None
    assert float(cache.take()) == 0.0  # what the candidates showed is forgotten
    return float(scale), float(largest_scale(amax, quant))


def states() -> Tensor:
    return torch.randn(1, 64, 96, generator=torch.Generator().manual_seed(0))


def test_large_keys_that_no_query_asks_for_are_clipped() -> None:
    hidden = states()
    hidden[..., 5] = 0.0
    hidden[0, 60, 32 + 5] = 12.0
    found, plain = searched(hidden, "int8")
    assert plain == pytest.approx(12 / 127)
    assert found == pytest.approx(0.4 * plain)


def test_many_large_values_are_not() -> None:
    hidden = states().sign()
    found, plain = searched(hidden, "int8")
    assert found == plain == pytest.approx(1 / 127)


def test_small_values_leave_the_subnormal_numbers_of_fp8() -> None:
    hidden = states()
    hidden[..., 32:] *= 0.004
    found, plain = searched(hidden, "fp8")
    assert plain == 1.0
    assert found < 0.01


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("kv")
    found = {}
    for name, kv_cache, choice in (("int8", "int8", "auto"), ("largest", "int8", "largest"), ("fp8", "fp8", "auto")):
        wanted = {"format": "none", "kv_cache": kv_cache, "kv_scales": choice}
        data = {"samples": 12, "sequence_length": 128}
        config = CalibrateConfig.parse(wanted | {"data": data}, "test")
        found[name] = calibrate(config, DEMO_MODEL, directory / name).path
    return found


def scales(calibration: Path, kv_cache: KvCacheFormat, out: Path) -> list[float]:
    made = convert(ConvertConfig(kv_cache=kv_cache), DEMO_MODEL, out, calibration=calibration).path
    rank = load_file(made / "rank0.safetensors")
    return [float(rank[f"transformer.layers.{n}.attention.kv_cache_scaling_factor"]) for n in range(4)]


def test_searched_scales_lose_less_than_those_of_the_largest_values(
    calibrations: dict[str, Path], tmp_path: Path
) -> None:
    found, plain = (scales(calibrations[name], "int8", tmp_path / name) for name in ("int8", "largest"))
    amax = load_file(calibrations["largest"] / FILE)
    assert plain == pytest.approx([float(amax[f"layers.{n}.kv_amax"]) / 127 for n in range(4)])
    assert all(one <= other for one, other in zip(found, plain, strict=True))
    better, worse = (verify(tmp_path / name, DEMO_MODEL, GATE).kl_mean for name in ("int8", "largest"))
    assert better < 0.85 * worse


def test_modelopts_scales_stay(calibrations: dict[str, Path], tmp_path: Path) -> None:
    for name in ("largest", "fp8"):
        assert not [tensor for tensor in load_file(calibrations[name] / FILE) if tensor.endswith(".kv_scale")]
    assert scales(calibrations["fp8"], "fp8", tmp_path / "fp8") == [1.0] * 4
    # What was searched for INT8 says nothing about FP8.
    assert scales(calibrations["int8"], "fp8", tmp_path / "other") == [1.0] * 4
