"""Weights in 16, 8 and 4 bits that the kernels expand where they multiply them, with every set of instructions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.kernel_levels import LEVELS, kernels_at
from trtforge.core.number_limits import E2M1_VALUES, NVFP4_BLOCK
from trtforge.models.kernels import PACKED_GROUPS, suits_cpu
from trtforge.models.transforms import FP8_ROW_SCALE_MIN
from trtforge.runtime.linears.float8 import round_to_e4m3
from trtforge.runtime.linears.fp8_rowwise_linear import token_scales
from trtforge.runtime.linears.int4_native import pack_words
from trtforge.runtime.linears.int8 import round_by_group, round_to_int8
from trtforge.runtime.linears.nvfp4_linear import round_to_nvfp4
from trtforge.runtime.native.expanded import (
    ExpandedLayer,
    Format,
    Inputs,
    linear_expanded,
    row_scales,
)
from trtforge.runtime.native.structures import FORMATS
from trtforge.runtime.native.tiles import TILE, pack_bfloat16, pack_bytes

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of the sum of the absolute products: sums in another order, and the rounding of the result."""
ALL_E4M3 = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def weights(format: Format, outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random weights as float64, and packed."""
    match format:
        case "bfloat16":
            values = torch.randn(outputs, inputs, generator=generator).bfloat16()
            return values.double(), pack_bfloat16(values)
        case "float16":
            values = torch.randn(outputs, inputs, generator=generator).mul(0.01).half()
            return values.double(), pack_bfloat16(values)
        case "int8":
            codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
            return codes.double(), pack_bytes(codes)
        case "e4m3":
            chosen = torch.randint(len(ALL_E4M3), (outputs, inputs), generator=generator)
            codes = ALL_E4M3[chosen]
            return codes.view(torch.float8_e4m3fn).double(), pack_bytes(codes.view(torch.int8))
        case "int4":
            codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, generator=generator)
            return codes.double(), pack_words(codes)
        case "e2m1":
            chosen = torch.randint(16, (outputs, inputs), generator=generator)
            return torch.tensor(E2M1_VALUES).double()[chosen], pack_words((chosen - 8).to(torch.int8))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 14) | st.sampled_from([31, 192, 193, 200, 513]),
    tiles=st.integers(1, 3),
    inputs=st.sampled_from([16, 64, 128, 144, 256, 288, 400]),
    group=st.sampled_from([None, 16, 64, 96, 128, 144]),
    biased=st.booleans(),
    prescaled=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products(
    level: str, dtype: torch.dtype, format: Format, rows: int, tiles: int, inputs: int, group: int | None,
    biased: bool, prescaled: bool, seed: int,
) -> None:  # fmt: skip
    generator, outputs = torch.Generator().manual_seed(seed), tiles * TILE
    exact, packed = weights(format, outputs, inputs, generator)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    scales = prequant = bias = None
    group = NVFP4_BLOCK if format == "e2m1" else group
    wanted = x.double()
    if prescaled:
        prequant = torch.rand(inputs, generator=generator) + 0.5
        wanted = (x.float() * prequant).double()
    if group is not None and inputs % group == 0:
        scales = torch.rand(tiles, inputs // group, TILE, generator=generator)
        if format == "e2m1":
            scales = scales.to(torch.float8_e4m3fn).float()  # as NVFP4's are: bfloat16 holds their products exactly
        by_output = scales.transpose(1, 2).reshape(outputs, inputs // group).double()
        exact = exact * by_output.repeat_interleave(group, dim=1)
    expected, most = wanted @ exact.T * 0.5, wanted.abs() @ exact.abs().T
    if biased:
        bias = torch.randn(outputs, generator=generator)
        expected, most = expected + bias, most + bias.abs()
    layer = ExpandedLayer(format, packed, outputs, scales, bias, prequant, factor=0.5)
    made = linear_expanded(kernels_at(level), x, layer)
    assert made.dtype is dtype
    assert made.shape == (rows, outputs)
    assert bool(((made.double() - expected).abs() <= CLOSE[dtype] * most).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("inputs", ["e4m3", "int8", "e4m3 by row", "nvfp4"])
def test_activations_are_rounded_as_torchs_operations_round_them(
    level: str, dtype: torch.dtype, inputs: Inputs
) -> None:
    """Identity matrices show the rounded numbers themselves."""
    generator, size = torch.Generator().manual_seed(0), 64
    x = torch.randn(300, size, generator=generator) * torch.logspace(-4, 3, 300).unsqueeze(1)
    x[7], x[8] = 0.0, torch.arange(size) / 8 - 4  # ties, too
    x = x.to(dtype)
    codes = torch.eye(size, dtype=torch.int8)
    layer = ExpandedLayer("int8", pack_bytes(codes), size, inputs=inputs, activation_scale=0.37)
    match inputs:
        case "e4m3":
            expected = round_to_e4m3(x, 0.37)
        case "int8":
            expected = round_to_int8(x, 0.37).float()
        case "nvfp4":
            expected = round_to_nvfp4(x, torch.tensor([0.37]))
        case _:
            layer = ExpandedLayer("int8", pack_bytes(codes), size, inputs=inputs, activation_scale=FP8_ROW_SCALE_MIN)
            expected = round_to_e4m3(x, token_scales(x)) * token_scales(x)
    assert torch.equal(linear_expanded(kernels_at(level), x, layer), expected.to(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 26) | st.sampled_from([96, 97, 200]),
    tiles=st.integers(1, 3),
    inputs=st.sampled_from([16, 128, 144, 400, 1008]),
    seed=st.integers(0, 2**16),
)
def test_products_of_integers_are_exact(
    level: str, dtype: torch.dtype, rows: int, tiles: int, inputs: int, seed: int
) -> None:
    """Up to sums of 2^24, of the largest numbers of both signs too."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (tiles * TILE, inputs), dtype=torch.int8, generator=generator)
    x = torch.randint(-150, 150, (rows, inputs), generator=generator).to(dtype)
    codes[0], codes[-1], x[0] = -128, 127, -128
    layer = ExpandedLayer("int8", pack_bytes(codes), tiles * TILE, inputs="int8", activation_scale=0.5)
    expected = round_to_int8(x, 0.5).double() @ codes.double().T
    assert torch.equal(linear_expanded(kernels_at(level), x, layer), expected.to(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 34) | st.sampled_from([63, 97, 257, 530]),
    tiles=st.integers(1, 5),
    count=st.integers(1, 4),
    group=st.sampled_from(PACKED_GROUPS),
    biased=st.booleans(),
    prescaled=st.booleans(),
    outlier=st.sampled_from([1.0, 1000.0, 2.0**-120]),
    seed=st.integers(0, 2**16),
)
def test_int4_products_of_inputs_rounded_by_group(
    level: str, dtype: torch.dtype, rows: int, tiles: int, count: int, group: int, biased: bool, prescaled: bool,
    outlier: float, seed: int,
) -> None:  # fmt: skip
    """`outlier`: a factor of one input of each row."""
    generator, outputs, inputs = torch.Generator().manual_seed(seed), tiles * TILE, count * group
    codes, packed = weights("int4", outputs, inputs, generator)
    x = torch.randn(rows, inputs, generator=generator)
    x[:, seed % inputs] *= outlier
    x[seed % rows, :group] = 0.0
    x = x.to(dtype)
    scales = torch.rand(tiles, count, TILE, generator=generator)
    exact = codes * scales.transpose(1, 2).reshape(outputs, count).double().repeat_interleave(group, dim=1)
    prequant = torch.rand(inputs, generator=generator) + 0.5 if prescaled else None
    bias = torch.randn(outputs, generator=generator) if biased else None
    rounded = round_by_group(x.float() if prequant is None else x.float() * prequant, group).double()
    expected, most = rounded @ exact.T, rounded.abs() @ exact.abs().T
    if bias is not None:
        expected, most = expected + bias, most + bias.abs()
    layer = ExpandedLayer("int4", packed, outputs, scales, bias, prequant, inputs="int8 by group")
    made = linear_expanded(kernels_at(level), x, layer)
    assert made.dtype is dtype
    assert bool(((made.double() - expected).abs() <= CLOSE[dtype] * most).all())


@pytest.mark.parametrize("level", LEVELS)
def test_rows_that_are_not_finite_stay_so_beside_others(level: str) -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 40] = torch.inf, torch.nan
    codes = torch.ones(TILE, 64, dtype=torch.int8)
    layer = ExpandedLayer("int4", pack_words(codes), TILE, torch.ones(1, 2, TILE), inputs="int8 by group")
    made = linear_expanded(kernels_at(level), x, layer)
    assert made[:2].isnan().all()
    assert torch.equal(made[2], torch.full((TILE,), 64.0))


@pytest.mark.parametrize("level", LEVELS)
def test_codes_of_the_largest_numbers_of_both_signs(level: str) -> None:
    """Sums are exact in every instruction's integers."""
    codes = torch.full((TILE, 256), -8, dtype=torch.int8)
    codes[1::2] = 7
    x = torch.full((2, 256), 127.0)
    x[1] = -127.0
    layer = ExpandedLayer("int4", pack_words(codes), TILE, torch.ones(1, 1, TILE), inputs="int8 by group")
    made = linear_expanded(kernels_at(level), x, layer)
    assert torch.equal(made, x @ codes.float().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_every_number_of_e4m3_is_exact(level: str, dtype: torch.dtype) -> None:
    """Subnormal ones too; each output of a row has one of them."""
    codes = torch.zeros(256, 256, dtype=torch.uint8)
    codes[range(len(ALL_E4M3)), range(len(ALL_E4M3))] = ALL_E4M3
    layer = ExpandedLayer("e4m3", pack_bytes(codes.view(torch.int8)), 256)
    for rows in (1, 3):
        made = linear_expanded(kernels_at(level), torch.ones(rows, 256, dtype=dtype), layer)
        exact = codes.view(torch.float8_e4m3fn).float().sum(dim=1)
        assert torch.equal(made.float(), exact.expand(rows, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_every_number_of_e2m1_is_exact(level: str, dtype: torch.dtype) -> None:
    codes = torch.zeros(32, 16, dtype=torch.int8)
    codes[range(32), torch.arange(32) % 16] = torch.arange(32, dtype=torch.int8) % 16
    layer = ExpandedLayer("e2m1", pack_words(codes - 8), 32, torch.ones(1, 1, 32))
    for rows in (1, 3):
        made = linear_expanded(kernels_at(level), torch.ones(rows, 16, dtype=dtype), layer)
        assert torch.equal(made.float(), torch.tensor(E2M1_VALUES).repeat(2).expand(rows, -1))


@pytest.mark.parametrize("level", LEVELS)
def test_every_number_of_float16_is_exact(level: str) -> None:
    """Subnormal ones too, apart from infinities and what is no number; each output of a row has one of them."""
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    finite = codes[codes.isfinite()]
    values = torch.zeros(len(finite), 16, dtype=torch.float16)
    values[range(len(finite)), torch.arange(len(finite)) % 16] = finite
    made = linear_expanded(
        kernels_at(level), torch.ones(2, 16), ExpandedLayer("float16", pack_bfloat16(values), len(finite))
    )
    assert torch.equal(made, finite.float().expand(2, -1))


def test_scales_of_rows_lie_in_tiles() -> None:
    scales = torch.rand(96)
    assert torch.equal(row_scales(scales).flatten(), scales)
    assert row_scales(scales).shape == (3, 1, TILE)


def test_sizes_that_the_kernels_take() -> None:
    assert suits_cpu(64, 48)
    assert not suits_cpu(60, 48)
    assert not suits_cpu(64, 40)
