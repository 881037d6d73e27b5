"""Fused kernels in Triton's language compute what torch's operations do."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.runtime.cuda.kernels import DEVICE, fused
from trtforge.models.transforms import quantize_fp8
from trtforge.runtime.architecture.activations import NATIVE_ACTIVATIONS
from trtforge.runtime.architecture.rotary import Rotary, RotarySpec, Rotation
from trtforge.runtime.linears.int8 import round_to_int8

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
"""Of one rounding; Triton's interpreter (3.9) cuts the digits of bfloat16 off."""
by_dtype = pytest.mark.parametrize("dtype", TOLERANCES)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def is_near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    assert found.dtype is dtype
    return torch.allclose(found.double(), exact.double(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 1e-2)


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(x.double(), weight.shape, weight.double(), epsilon)


@by_dtype
@pytest.mark.parametrize("size", [64, 100, 1536])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    x, weight = randn(3, 2, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    assert is_near(fused().rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), dtype)


def test_rms_norm_with_a_weight_of_another_type() -> None:
    x, weight = randn(3, 96, dtype=torch.bfloat16), randn(96, seed=1)
    assert is_near(fused().rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), torch.bfloat16)


@by_dtype
def test_rms_norm_of_columns(dtype: torch.dtype) -> None:
    x, y, weight = randn(3, 80, dtype=dtype), randn(3, 90, dtype=dtype, seed=2), randn(64, dtype=dtype, seed=1)
    before = y.clone()
    fused().rms_norm_into(x[:, 7:71], weight, 1e-6, y[:, 10:74])
    assert is_near(y[:, 10:74], normed(x[:, 7:71], weight, 1e-6), dtype)
    assert torch.equal(y[:, :10], before[:, :10])
    assert torch.equal(y[:, 74:], before[:, 74:])


@by_dtype
def test_rms_norm_of_some_heads_in_place(dtype: torch.dtype) -> None:
    heads, weight = randn(3, 7, 48, dtype=dtype), randn(48, dtype=dtype, seed=1)
    before = heads.clone()
    fused().rms_norm_heads(heads[:, 2:5], weight, 1e-6)
    assert is_near(heads[:, 2:5], normed(before[:, 2:5], weight, 1e-6), dtype)
    assert torch.equal(heads[:, :2], before[:, :2])
    assert torch.equal(heads[:, 5:], before[:, 5:])


@by_dtype
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_sum_and_its_norm(dtype: torch.dtype, scale: float) -> None:
    x, change, weight = (randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(5, 96), (5, 96), (96,)]))
    total, y = fused().add_rms_norm(x, change, weight, scale, 1e-5)
    exact = x.double() + torch.tensor(scale, dtype=torch.float32).double() * change.double()
    assert is_near(total, exact, dtype)
    assert is_near(y, normed(total, weight, 1e-5), dtype)
    assert torch.equal(fused().add(x, change, scale), total)


@by_dtype
def test_columns_are_scaled(dtype: torch.dtype) -> None:
    x, factors = randn(3, 1300, dtype=dtype), randn(1100, dtype=dtype, seed=1)
    assert is_near(fused().scale_columns(x[:, 100:1200], factors), x[:, 100:1200].double() * factors.double(), dtype)


@by_dtype
@pytest.mark.parametrize("activated", [0, 1])
@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS, ids=NATIVE_ACTIVATIONS.get)
def test_gates(dtype: torch.dtype, activated: int, activation: object) -> None:
    """Of more columns than a program has; large numbers do not overflow on the way."""
    halves = 3 * randn(3, 2 * 1100, dtype=dtype)
    halves[0, :4], halves[0, 1100:1104] = 30.0, -30.0
    parts = halves.double().chunk(2, dim=1)
    found = fused().gate(halves, NATIVE_ACTIVATIONS[activation], activated)  # type: ignore[index]
    exact = activation(parts[activated]) * parts[1 - activated]  # type: ignore[operator]
    assert torch.allclose(found.double(), exact, rtol=max(TOLERANCES[dtype], 2e-5), atol=1e-5)


@by_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [48, 64])
def test_rotations_of_some_heads(dtype: torch.dtype, interleaved: bool, dim: int) -> None:
    """Of the first elements of heads, at positions of 100,000 and more too."""
    spec = RotarySpec(dim, 10000.0, 131072, None, interleaved)
    positions = torch.tensor([0, 1, 77, 4095, 131071], device=DEVICE)
    exact = Rotary(spec, 131072, torch.device("cpu")).at(positions.cpu(), torch.float32)
    plain = Rotary(spec, 131072, DEVICE)
    frequencies, factor = plain._of_longest
    cos, sin = fused().rotation(positions, frequencies, factor, dtype, interleaved=interleaved)
    for found, expected in ((cos, exact.cos), (sin, exact.sin)):
        assert found.dtype is dtype
        assert (found.float().cpu() - expected).abs().max() <= max(TOLERANCES[dtype], 2e-5)
    heads = randn(5, 6, 64, dtype=dtype)
    expected = heads.clone().float()
    Rotation(cos.float(), sin.float(), interleaved).turn(expected[:, :5])
    fused().rotate(heads[:, :5], cos, sin, interleaved=interleaved)
    assert torch.allclose(heads.float(), expected, rtol=TOLERANCES[dtype], atol=2e-6 + TOLERANCES[dtype] / 2)
    assert torch.equal(heads[:, 5].float(), expected[:, 5])


@by_dtype
def test_slots_take_values(dtype: torch.dtype) -> None:
    """Of tokens that are a part of wider ones."""
    wide, storage = randn(3, 5, 300, dtype=dtype), torch.zeros(8, 4, 300, dtype=dtype, device=DEVICE)
    slots = torch.tensor([6, 0, 3], device=DEVICE)
    fused().write_slots(storage, slots, wide[:, 1:])
    expected = torch.zeros_like(storage).index_copy_(0, slots, wide[:, 1:])
    assert torch.equal(storage, expected)


@by_dtype
@pytest.mark.parametrize("storage", [torch.int8, torch.uint8])
def test_slots_take_quantised_values(dtype: torch.dtype, storage: torch.dtype) -> None:
    """Halves are rounded to even, what is beyond the largest number is that number."""
    values = 20 * randn(4, 2, 600, dtype=dtype)
    values[0, 0, :4] = torch.tensor([0.25, 0.75, 1e4, -1e4], dtype=dtype)
    slots = torch.tensor([5, 1, 0, 2], device=DEVICE)
    cache = torch.zeros(6, 2, 600, dtype=storage, device=DEVICE)
    fused().quantize_slots(cache, slots, values, 0.5)
    codes = round_to_int8(values, 0.5) if storage is torch.int8 else quantize_fp8(values, 0.5).view(torch.uint8)
    assert torch.equal(cache, torch.zeros_like(cache).index_copy_(0, slots, codes))


@by_dtype
@pytest.mark.parametrize("storage", [None, torch.int8, torch.uint8])
@pytest.mark.parametrize(("dim", "interleaved"), [(48, False), (64, False), (48, True)])
def test_heads_are_rotated_and_written_at_once(
    dtype: torch.dtype, storage: torch.dtype | None, dim: int, interleaved: bool
) -> None:
    """As one after the other. Of 5 queries, 2 keys and 2 values, whose heads are a part of wider tokens."""
    kernels, heads, scale = fused(), randn(4, 10, 64, dtype=dtype)[:, 1:], 1.0 if storage is None else 0.03
    cos, sin = (randn(4, 1, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    slots, expected = torch.tensor([5, 1, 0, 2], device=DEVICE), heads.clone()
    found, cached = (torch.zeros(6, 4, 64, dtype=storage or dtype, device=DEVICE) for _ in range(2))
    kernels.rotate(expected[:, :7], cos, sin, interleaved=interleaved)
    kernels.quantize_slots(cached, slots, expected[:, 5:], scale)
    kernels.rotate_and_write(heads, cos, sin, found, slots, scale, queries=5, keys=2, interleaved=interleaved)
    assert torch.equal(heads, expected)
    assert torch.equal(found, cached)
    assert found[[5, 1, 0, 2]].float().abs().sum(dim=(1, 2)).min() > 0


@by_dtype
def test_e4m3(dtype: torch.dtype) -> None:
    values, scale = 30 * randn(3, 700, dtype=dtype), torch.tensor([0.11], device=DEVICE)
    values[0, :3] = torch.tensor([1e4, -1e4, 0.0], dtype=dtype)
    found = fused().quantize(values, scale)
    assert torch.equal(found.view(torch.uint8), quantize_fp8(values, scale).view(torch.uint8))


@by_dtype
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_norms_and_gates_as_e4m3_are_those_that_are_rounded_afterwards(dtype: torch.dtype, scale: float) -> None:
    kernels, code_scale = fused(), torch.tensor([0.013], device=DEVICE)
    x, change, weight = (randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(5, 96), (5, 96), (96,)]))
    total, normed = kernels.add_rms_norm(x, change, weight, scale, 1e-5)
    found, codes = kernels.add_rms_norm(x, change, weight, scale, 1e-5, code_scale)
    assert torch.equal(found, total)
    assert torch.equal(codes.view(torch.uint8), kernels.quantize(normed, code_scale).view(torch.uint8))
    alone = kernels.rms_norm_codes(x, weight, 1e-5, code_scale)
    expected = kernels.quantize(kernels.rms_norm(x, weight, 1e-5), code_scale)
    assert torch.equal(alone.view(torch.uint8), expected.view(torch.uint8))
    halves = randn(3, 2 * 1100, dtype=dtype)
    gated = kernels.gate(halves, "silu", 1, code_scale)
    expected = kernels.quantize(kernels.gate(halves, "silu", 1), code_scale)
    assert gated.dtype is torch.float8_e4m3fn
    assert torch.equal(gated.view(torch.uint8), expected.view(torch.uint8))
    assert len(set(gated.view(torch.uint8).flatten().tolist())) > 150


@by_dtype
@pytest.mark.parametrize("columns", [1, 70, 2048, 9001])
def test_the_first_of_the_largest_is_found(dtype: torch.dtype, columns: int) -> None:
    """Of rows of a wider tensor, with many equal numbers, and with none but the smallest; NaN is never found."""
    x = randn(6, columns + 3, dtype=dtype).round()[:, :columns]
    x[1], x[2], x[3, columns // 2] = float("-inf"), 7.0, 1000.0
    x[4, -1] = 1000.0
    x[5, : columns - 1] = float("nan")
    found = fused().argmax(x)
    expected = x.float().nan_to_num(float("-inf")).cpu().numpy().argmax(1)  # torch's choice among several is any
    assert found.dtype is torch.int64
    assert found.tolist() == expected.tolist()


def test_nothing_to_compute() -> None:
    kernels, none = fused(), torch.empty(0, 64, device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    assert kernels.rms_norm(none, weight, 1e-5).shape == (0, 64)
    assert kernels.gate(none, "silu", 0).shape == (0, 32)
    assert kernels.add(none, none, 1.0).shape == (0, 64)
    assert kernels.scale_columns(none, weight).shape == (0, 64)
    assert kernels.quantize(none, weight[:1]).shape == (0, 64)
    assert kernels.argmax(none).shape == (0,)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    kernels.write_slots(torch.zeros(2, 1, 64, device=DEVICE), slots, none.view(0, 1, 64))
