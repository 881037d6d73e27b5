"""Linear layers that keep their weights in 16, 8 and 4 bits compute what the reference kernels compute."""

import pytest
import torch
from torch import Tensor

from trtforge.models.transforms import pack_int4
from trtforge.runtime.linears.byte_native import Fp8Native, Fp8RowwiseNative, Int8Native
from trtforge.runtime.linears.fp8_linear import Fp8Dense
from trtforge.runtime.linears.fp8_rowwise_linear import Fp8RowwiseDense
from trtforge.runtime.linears.int4_linear import Int4Dense
from trtforge.runtime.linears.int4_native import Int4Native
from trtforge.runtime.linears.int8_linear import Int8Dense, SmoothQuant
from trtforge.runtime.linears.linear import Dense, Kernel, Placement, Stored
from trtforge.runtime.linears.nvfp4_linear import Nvfp4Dense
from trtforge.runtime.linears.nvfp4_native import Nvfp4Native
from trtforge.runtime.linears.plain_native import PlainNative
from trtforge.runtime.linears.w4a8_linear import W4A8, W4A8Native
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.compiler import VARIABLE

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
SUITED, ODD = (64, 96), (60, 48)
PAIRS: dict[str, tuple[Kernel, Kernel]] = {
    "bfloat16": (PlainNative(), Dense()),
    "float16": (PlainNative(), Dense()),
    "fp8": (Fp8Native(), Fp8Dense()),
    "fp8_rowwise": (Fp8RowwiseNative(), Fp8RowwiseDense()),
    "int8_wo": (Int8Native(), Int8Dense()),
    "int8_sq": (SmoothQuant(integer=True), SmoothQuant(integer=False)),
    "int4_awq": (Int4Native(), Int4Dense()),
    "nvfp4": (Nvfp4Native(), Nvfp4Dense()),
    "w4a8": (W4A8Native(), W4A8(Int4Dense())),
}
"""The kernel, and the reference."""


def stored(name: str, shape: tuple[int, int]) -> Stored:
    """A layer as a checkpoint has it."""
    generator, (outputs, inputs) = torch.Generator().manual_seed(0), shape
    bias, scales = torch.randn(outputs, generator=generator), torch.rand(outputs, generator=generator) / 100 + 0.001
    weight, one = torch.randn(shape, generator=generator), torch.tensor([0.03])
    codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    prequant = torch.rand(inputs, generator=generator) + 0.5
    match name:
        case "bfloat16":
            return Stored(weight.bfloat16(), bias)
        case "float16":
            return Stored(weight.half(), bias)
        case "fp8":
            return Stored(weight.to(torch.float8_e4m3fn), bias, one, one)
        case "fp8_rowwise":
            return Stored(weight.to(torch.float8_e4m3fn), bias, scales)
        case "int8_wo":
            return Stored(codes, bias, scales)
        case "int8_sq":
            return Stored(codes, bias, scales, one, prequant)
        case "nvfp4":
            halves = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
            blocks = (torch.rand(outputs, inputs // 16, generator=generator) * 448).to(torch.float8_e4m3fn)
            return Stored(halves, bias, blocks, one / 4, None, one)
        case _:
            groups = torch.rand(outputs, inputs // (32 if shape == SUITED else 24), generator=generator) + 0.5
            return Stored(pack_int4(codes // 16), bias, groups, one, prequant, torch.tensor([0.01]))


def computed(kernel: Kernel, layer: Stored, shape: tuple[int, int], x: Tensor) -> Tensor:
    packed = {f"x.{name}": tensor for name, tensor in kernel.pack(layer, x.dtype).items()}
    source = Weights.of(packed, "test")
    linear = kernel.load(source, "x", shape, Placement(torch.device("cpu"), x.dtype), bias=True)
    source.finish()
    return linear(x)


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [SUITED, ODD])
@pytest.mark.parametrize("name", PAIRS)
def test_layers_equal_the_reference(
    name: str, shape: tuple[int, int], dtype: torch.dtype, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setenv(VARIABLE, "torch")
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    kernel, reference = PAIRS[name]
    layer = stored(name, shape)
    made, expected = computed(kernel, layer, shape, x), computed(reference, layer, shape, x)
    assert made.dtype is dtype
    assert (made.float() - expected.float()).abs().max() <= CLOSE[dtype] * expected.float().abs().max()


def test_weights_of_32_bits_are_packed_in_the_compute_type() -> None:
    weight = torch.randn(SUITED)
    packed = PlainNative().pack(Stored(weight), torch.float32)
    assert torch.equal(packed["weight"], weight)
    x = torch.randn(3, SUITED[1])
    made = computed(PlainNative(), Stored(weight, torch.zeros(SUITED[0])), SUITED, x)
    assert torch.allclose(made, x @ weight.t(), atol=1e-4)
