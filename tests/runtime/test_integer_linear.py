"""Kernels of the integer formats against the formats' definitions, element by element."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.quantised import weight_only
from tests.runtime.test_linear import computed, int4_layer, relative
from trtforge.core.errors import ForgeError
from trtforge.runtime.linears.int4_linear import Int4Dense, Int4Packed
from trtforge.runtime.linears.int8 import round_to_int8
from trtforge.runtime.linears.int8_linear import Int8Dense, SmoothQuant
from trtforge.runtime.linears.linear import Stored, merged
from trtforge.runtime.linears.w4a8_linear import W4A8
from trtforge.runtime.linears.weight_only import quantize_weight_only, round_half_away

FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
TYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)]
)


@given(st.lists(FLOATS, min_size=1, max_size=64))
def test_halves_are_rounded_away_from_zero(values: list[float]) -> None:
    """As C's round(), also where adding a half would be rounded up."""
    values = [*values, 0.5, 1.5, 2.5, 0.49999997, 0.0]
    for sign in (1, -1):
        made = round_half_away(torch.tensor(values) * sign).tolist()
        assert made == [sign * _rounded(value) for value in values]


def _rounded(value: float) -> float:
    """In float64 the sum is exact."""
    return float(int(abs(value) + 0.5)) * (-1 if value < 0 else 1)


@given(st.lists(FLOATS, min_size=1, max_size=64), st.sampled_from([0.03, 0.5, 1.0, 7.0]))
def test_int8_is_the_nearest_integer_that_fits(values: list[float], scale: float) -> None:
    exact = torch.tensor(values) / scale
    made = round_to_int8(torch.tensor(values), scale)
    assert made.dtype is torch.int8
    inside = (exact > -128.5) & (exact < 127.5)
    assert ((made - exact)[inside].abs() <= 0.5).all()
    assert torch.equal(made[~inside].float(), exact[~inside].sign() * 127.5 - 0.5)


def test_int8_rounds_halves_to_even() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 1e9, -1e9])
    assert round_to_int8(values, 1.0).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128]
    assert round_to_int8(values.bfloat16() * 0.25, torch.tensor([0.25])).tolist()[:5] == [0, 2, 2, 0, -2]


@given(st.integers(0, 1000), st.sampled_from([4, 8]), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_weight_only_codes_are_within_half_a_step(seed: int, bits: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)) * 0.1).to(dtype)
    weight[1] = 0
    codes, scales = quantize_weight_only(weight, bits)  # type: ignore[arg-type]
    half = 2 ** (bits - 1)
    step = weight.float().abs().amax(1) / half
    assert (codes.min() >= -half, codes.max() <= half - 1, scales.dtype) == (True, True, dtype)
    assert torch.equal(scales, step.to(dtype))
    within = codes < half - 1  # the largest positive weight is clamped, a whole step away
    assert ((codes * step[:, None] - weight.float()).abs() <= step[:, None] * 0.5001)[within].all()
    assert not codes[1].any()


def test_weight_only_saturates_at_the_largest_positive_weight() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.5, 1.5 / 128, -1.5 / 128, 0.0]])
    codes, scales = quantize_weight_only(weight, 8)
    assert (codes.tolist(), scales.tolist()) == ([[127, -128, 64, 2, -2, 0]], [1 / 128])
    codes, scales = quantize_weight_only(weight, 4)
    assert (codes.tolist(), scales.tolist()) == ([[7, -8, 4, 0, 0, 0]], [1 / 8])


def test_experts_are_quantised_one_by_one() -> None:
    stack = torch.randn(3, 4, 8)
    codes, scales = quantize_weight_only(stack, 4)
    for index, expert in enumerate(stack):
        alone = quantize_weight_only(expert, 4)
        assert torch.equal(codes[index], alone[0])
        assert torch.equal(scales[index], alone[1])


@TYPES
def test_int8_weights_only(dtype: torch.dtype, tolerance: float) -> None:
    weight, bias = torch.randn(32, 64).to(dtype), torch.randn(32)
    codes, scales = quantize_weight_only(weight, 8)
    x = torch.randn(5, 64).to(dtype)
    reference = x.float() @ weight_only(weight.float(), 8, dtype).t() + bias
    made = computed(Int8Dense(), Stored(codes, bias, scales.float()), x, 32)
    assert made.dtype is dtype
    assert relative(made, reference) < tolerance


def smooth_layer(inputs: int = 64) -> Stored:
    generator = torch.Generator().manual_seed(0)
    return Stored(
        torch.randint(-128, 128, (32, inputs), generator=generator, dtype=torch.int8),
        torch.randn(32, generator=generator),
        weights_scale=torch.rand(32, generator=generator) * 0.01 + 0.001,
        activation_scale=torch.tensor([0.017]),
        prequant=torch.rand(inputs, generator=generator) + 0.5,
    )


@TYPES
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_smoothquant_rounds_inputs_with_one_scale_and_saturates(
    dtype: torch.dtype, tolerance: float, integer: bool, rows: int
) -> None:
    stored = smooth_layer()
    x = torch.randn(rows, 64).to(dtype)
    x[0, 0], x[0, 1] = 100.0, -100.0
    assert stored.prequant is not None
    assert stored.weights_scale is not None
    codes = (x.float() * stored.prequant / 0.017).round().clamp(-128, 127)
    assert codes[0, :2].tolist() == [127, -128]
    reference = codes @ stored.weight.float().t() * (0.017 * stored.weights_scale) + stored.bias
    made = computed(SmoothQuant(integer=integer), stored, x, 32)
    assert made.dtype is dtype
    assert relative(made, reference) < tolerance


def test_the_products_of_integers_do_not_saturate() -> None:
    """Pairs of the largest products need 17 bits, a whole row of them 26."""
    weight = torch.full((32, 4096), -128, dtype=torch.int8)
    ones = torch.ones(32)
    stored = Stored(weight, None, weights_scale=ones, activation_scale=torch.ones(1), prequant=torch.ones(4096))
    made = computed(SmoothQuant(integer=True), stored, torch.full((3, 4096), -128.0), 32)
    assert torch.equal(made, torch.full((3, 32), 128.0 * 128 * 4096))


def w4a8_layer() -> tuple[Stored, Tensor]:
    """A layer of groups of 64, and the matrix for inputs in steps of its activation scale."""
    plain, _ = int4_layer()
    assert plain.weights_scale is not None
    second, act = torch.tensor([1e-4]), torch.tensor([0.011])
    stored = Stored(plain.weight, plain.bias, plain.weights_scale, act, plain.prequant, second)
    codes = torch.stack((((plain.weight & 15) ^ 8) - 8, plain.weight >> 4), 1).flatten(0, 1).float()
    groups = (plain.weights_scale / second).half().float().repeat_interleave(64, dim=1)
    return stored, codes * groups * second


@TYPES
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_w4a8_rounds_inputs_to_e4m3_and_saturates(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    stored, matrix = w4a8_layer()
    x = torch.randn(rows, 256).to(dtype)
    x[0, 0] = 100.0
    assert stored.prequant is not None
    inputs = (x.float() * (stored.prequant / 0.011)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert inputs[0, 0] == 448
    reference = inputs * 0.011 @ matrix.t() + stored.bias
    weights = [Int4Dense(), Int4Packed()] if dtype is torch.bfloat16 else [Int4Dense()]
    for kernel in map(W4A8, weights):
        made = computed(kernel, stored, x, 64)
        assert made.dtype is dtype
        assert relative(made, reference) < tolerance


def test_layers_are_merged_where_scales_of_tensors_agree() -> None:
    stored, _ = w4a8_layer()
    assert merged((stored, stored)) is not None
    assert stored.weights_scale_2 is not None
    other = Stored(
        stored.weight,
        stored.bias,
        stored.weights_scale,
        stored.activation_scale,
        stored.prequant,
        stored.weights_scale_2 * 2,
    )
    assert merged((stored, other)) is None
    smooth = smooth_layer()
    both = merged((smooth, smooth))
    assert both is not None
    assert both.weights_scale is not None
    assert (both.weight.shape, both.weights_scale.shape) == ((64, 64), (64,))


def test_inputs_that_int4_kernels_cannot_group_are_an_error() -> None:
    stored = Stored(torch.zeros(32, 48, dtype=torch.int8), weights_scale=torch.ones(64, 1))
    with pytest.raises(ForgeError, match="48 inputs on a rank: INT4 kernels need multiples of 32"):
        Int4Packed().pack(stored, torch.bfloat16)
