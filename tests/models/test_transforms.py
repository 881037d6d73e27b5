"""Number formats: packing is exact, and rounding is what the formats' definitions say."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trtforge.models.transforms import (
    dequantize_int4,
    fp8_scale,
    int4_scales,
    pack_int4,
    quantize_fp8,
    quantize_int4,
    unpack_int4,
)


@given(rows=st.integers(1, 9), columns=st.integers(1, 17), seed=st.integers(0, 1000))
def test_packing_is_undone(rows: int, columns: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (2 * rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    packed = pack_int4(codes)
    assert packed.shape == (rows, columns)
    assert packed.dtype == torch.int8
    assert torch.equal(unpack_int4(packed), codes)


def test_low_nibble_is_the_even_row() -> None:
    packed = pack_int4(torch.tensor([[1], [-2]], dtype=torch.int8))
    assert packed.item() & 0xFF == 0xE1


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_int4_error_is_at_most_half_a_step(seed: int, scale: float) -> None:
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(seed)) * scale
    scales = int4_scales(weight, 64)
    restored = dequantize_int4(quantize_int4(weight, scales), scales)
    step = scales.repeat_interleave(64, dim=1)
    assert ((restored - weight).abs() <= step * 0.5001).all()
    assert torch.allclose(scales, weight.unflatten(1, (2, 64)).abs().amax(2) / 7)


def test_zero_block_keeps_a_scale_of_one() -> None:
    weight = torch.zeros(2, 64)
    scales = int4_scales(weight, 64)
    assert torch.equal(scales, torch.ones(2, 1))
    assert torch.equal(quantize_int4(weight, scales), torch.zeros(2, 64, dtype=torch.int8))


def test_fp8_saturates_and_never_makes_nan() -> None:
    weight = torch.tensor([1000.0, -1000.0, 448.0, 0.0])
    assert quantize_fp8(weight, torch.ones(1)).float().tolist() == [448.0, -448.0, 448.0, 0.0]


def test_fp8_divides_in_float32() -> None:
    weight = torch.randn(64, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    scale = fp8_scale(weight.abs().amax().reshape(1))
    expected = (weight.double() / scale.double()).float().to(torch.float8_e4m3fn)
    assert torch.equal(quantize_fp8(weight, scale).view(torch.uint8), expected.view(torch.uint8))


def test_fp8_scale_of_zeros_is_one() -> None:
    assert fp8_scale(torch.zeros(1)).item() == 1.0
