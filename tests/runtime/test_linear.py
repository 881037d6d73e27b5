from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.models.transforms import quantize_fp8
from trtforge.runtime.linears import fp8_linear
from trtforge.runtime.linears.float8 import from_e4m3, round_to_e4m3
from trtforge.runtime.linears.fp8_linear import Fp8Dense, Fp8ScaledMatmul, ScaledMatmul
from trtforge.runtime.linears.int4_linear import Int4Dense, Int4Packed
from trtforge.runtime.linears.int4_tiled import Int4Tiled, W4A8Tiled
from trtforge.runtime.linears.linear import Dense, Kernel, Placement, Stored, merged
from trtforge.runtime.linears.weights import Weights


def computed(kernel: Kernel, stored: Stored, x: Tensor, out: int) -> Tensor:
    packed = kernel.pack(stored, x.dtype)
    weights = Weights.of({f"m.{name}": tensor for name, tensor in packed.items()})
    linear = kernel.load(weights, "m", (out, x.shape[1]), Placement(x.device, x.dtype), bias=True)
    weights.finish()
    return linear(x)


def relative(made: Tensor, reference: Tensor) -> float:
    return float((made.float() - reference).norm() / reference.norm())


def int4_layer(out: int = 64, inputs: int = 256, group: int = 64) -> tuple[Stored, Tensor]:
    """A layer and the matrix it stands for, written out element by element from the format's description."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (out, inputs), generator=generator)
    scales = torch.rand(out, inputs // group, generator=generator) * 0.02
    prequant = torch.rand(inputs, generator=generator) + 0.5
    packed = torch.empty(out // 2, inputs, dtype=torch.int8)
    for row in range(out // 2):
        packed[row] = ((codes[2 * row] & 15) | ((codes[2 * row + 1] & 15) << 4)).to(torch.uint8).view(torch.int8)
    matrix = codes.float() * scales.repeat_interleave(group, dim=1) * prequant
    bias = torch.randn(out, generator=generator)
    return Stored(packed, bias, weights_scale=scales, prequant=prequant), matrix


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_int4_computes_the_matrix_that_the_nibbles_stand_for(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    stored, matrix = int4_layer()
    x = torch.randn(rows, 256).to(dtype)
    reference = x.float() @ matrix.t() + stored.bias
    kernels = [Int4Dense()] if dtype is torch.float32 else [Int4Dense(), Int4Packed(), Int4Tiled()]
    for kernel in kernels:
        assert relative(computed(kernel, stored, x, 64), reference) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)])
def test_fp8_quantises_activations_with_the_static_scale_and_saturates(dtype: torch.dtype, tolerance: float) -> None:
    weight = (torch.randn(32, 64) * 50).to(torch.float8_e4m3fn)
    stored = Stored(weight, torch.randn(32), torch.tensor([0.01]), torch.tensor([0.002]))
    x = torch.randn(5, 64).to(dtype)
    x[0, 0] = 100.0
    quantised = (x.float() / 0.002).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert quantised[0, 0].float() == 448
    reference = quantised.float() @ weight.float().t() * 0.01 * 0.002 + stored.bias
    assert relative(computed(Fp8Dense(), stored, x, 32), reference) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "inputs"), [(24, 64), (32, 40)])
def test_fp8_layers_of_sizes_that_torchs_product_refuses_keep_numbers(
    out: int, inputs: int, dtype: torch.dtype
) -> None:
    """On a GPU it takes multiples of 16 only."""
    weight = (torch.randn(out, inputs) * 50).to(torch.float8_e4m3fn)
    stored, x = Stored(weight, torch.randn(out), torch.tensor([0.01]), torch.tensor([0.002])), torch.randn(5, inputs)
    made, expected = (computed(kernel, stored, x.to(dtype), out) for kernel in (Fp8ScaledMatmul(), Fp8Dense()))
    assert torch.equal(made, expected)
    packed = Weights.of({f"m.{name}": tensor for name, tensor in Fp8ScaledMatmul().pack(stored, dtype).items()})
    place = Placement(x.device, dtype)
    assert not isinstance(Fp8ScaledMatmul().load(packed, "m", (out, inputs), place, bias=True), ScaledMatmul)


@pytest.mark.parametrize(("capability", "multiplies"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_layers_are_multiplied_in_e4m3_on_gpus_that_can(
    capability: tuple[int, int], multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert fp8_linear._multiplies_e4m3(torch.device("cuda", 0)) is multiplies
    assert fp8_linear._multiplies_e4m3(torch.device("cpu"))


def test_fp8_weights_may_be_the_same_bytes_as_int8() -> None:
    weight = torch.randn(8, 16).to(torch.float8_e4m3fn)
    scales = {"weights_scale": torch.tensor([1.0]), "activation_scale": torch.tensor([0.01])}
    x = torch.randn(2, 16)
    as_bytes = computed(Fp8Dense(), Stored(weight.view(torch.int8), **scales), x, 8)
    assert torch.equal(as_bytes, computed(Fp8Dense(), Stored(weight, **scales), x, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_e4m3_value_is_read_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = ~codes.float().isnan()
    assert torch.equal(from_e4m3(codes, dtype)[numbers], codes.to(dtype)[numbers])


def test_rounding_in_float32_gives_the_number_that_is_stored() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((halves, halves * (1 + 1e-6), halves * (1 - 1e-6), codes, torch.randn(10000).exp()))
    values = torch.cat((near, -near, torch.tensor([0.0, 1e-30, 449.0, 1e9])))
    for scale in (torch.tensor([1.0]), torch.tensor([0.03])):
        stored = quantize_fp8(values, scale).float()
        assert torch.equal(round_to_e4m3(values, scale), stored)


def test_values_beyond_the_range_saturate() -> None:
    made = quantize_fp8(torch.tensor([1e9, -1e9, 449.0]), torch.tensor(1.0))
    assert made.float().tolist() == [448.0, -448.0, 448.0]


def test_layers_are_merged_only_where_one_scale_serves_both() -> None:
    a, _ = int4_layer()
    b = Stored(a.weight, a.bias, a.weights_scale, prequant=a.prequant)
    both = merged((a, b))
    assert both is not None
    assert (both.weight.shape[0], both.weights_scale.shape[0], both.bias.shape[0]) == (64, 128, 128)  # type: ignore[union-attr]
    assert merged((a, Stored(a.weight, a.bias, a.weights_scale, prequant=a.prequant + 1))) is None  # type: ignore[operator]
    fp8 = Stored(torch.zeros(2, 2), None, torch.tensor([1.0]), torch.tensor([1.0]))
    assert merged((fp8, Stored(fp8.weight, None, torch.tensor([2.0]), fp8.activation_scale))) is None
    assert merged((fp8, Stored(fp8.weight, None, fp8.weights_scale, torch.tensor([2.0])))) is None


@pytest.mark.parametrize("rows", [1, 40])
def test_a_bfloat16_matrix_is_computed_in_its_blocked_layout(rows: int) -> None:
    stored = Stored(torch.randn(48, 64), torch.randn(48))
    x = torch.randn(rows, 64).bfloat16()
    reference = x.float() @ stored.weight.bfloat16().float().t() + stored.bias.bfloat16().float()  # type: ignore[union-attr]
    assert relative(computed(Dense(), stored, x, 48), reference) < 6e-3


def test_an_int4_layer_that_torchs_kernel_cannot_tile_is_an_error() -> None:
    stored, _ = int4_layer(out=48)
    with pytest.raises(ForgeError, match="48 outputs on a rank"):
        Int4Packed().pack(stored, torch.bfloat16)


@pytest.mark.parametrize("kernel", [Int4Tiled(), W4A8Tiled()], ids=["int4", "w4a8"])
def test_an_int4_layer_that_lies_in_no_tiles_keeps_numbers(kernel: Kernel) -> None:
    stored, matrix = int4_layer(out=48)
    one = torch.ones(1)
    stored = replace(stored, weights_scale_2=one, activation_scale=one / 50)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert relative(computed(kernel, stored, x, 48), x.float() @ matrix.t() + stored.bias) < 0.05
