"""Layers whose weights stay codes of 8 and 4 bits on a GPU compute what dequantised weights give."""

import pytest
import torch
from torch import Tensor

from tests.runtime.cuda.kernels import DEVICE, products, rounding
from tests.runtime.cuda.test_products import TOLERANCES, error, randn
from tests.runtime.test_integer_linear import w4a8_layer
from tests.runtime.test_linear import computed
from trtforge.core.number_limits import E2M1_VALUES
from trtforge.runtime.cuda import products as cuda_products
from trtforge.runtime.cuda.products import MOST_ROWS
from trtforge.runtime.linears import byte_cuda, int4_tiled, nvfp4_tiled
from trtforge.runtime.linears.float8 import from_e4m3
from trtforge.runtime.linears.fp8_linear import Fp8Dense
from trtforge.runtime.linears.fp8_rowwise_linear import Fp8RowwiseDense
from trtforge.runtime.linears.int4_linear import Int4Dense
from trtforge.runtime.linears.int8_linear import Int8Dense, SmoothQuant
from trtforge.runtime.linears.linear import Kernel, Placement, Stored
from trtforge.runtime.linears.nvfp4_linear import Nvfp4Dense, from_e2m1
from trtforge.runtime.linears.w4a8_linear import W4A8
from trtforge.runtime.linears.weights import Weights

ROWS = [1, 3, MOST_ROWS + 1]
LAYERS: dict[str, tuple[Kernel, Kernel]] = {
    "int8_wo": (byte_cuda.Int8Cuda(), Int8Dense()),
    "fp8": (byte_cuda.Fp8Cuda(), Fp8Dense()),
    "fp8_rowwise": (byte_cuda.Fp8RowwiseCuda(), Fp8RowwiseDense()),
    "int8_sq": (byte_cuda.SmoothQuantCuda(), SmoothQuant(integer=False)),
    "w4a8": (int4_tiled.W4A8Tiled(), W4A8(Int4Dense())),
    "nvfp4": (nvfp4_tiled.Nvfp4Tiled(), Nvfp4Dense()),
}
"""Kernels, and what they are compared with in float32."""


def random_codes(outputs: int, inputs: int, *, e4m3: bool) -> Tensor:
    codes = torch.randint(-128, 128, (outputs, inputs), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    return torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn) if e4m3 else codes  # but for NaN


def layer(format: str, outputs: int, inputs: int) -> Stored:
    scales = torch.rand(outputs, generator=torch.Generator().manual_seed(4)) * 0.01 + 0.001
    bias, scale = randn(outputs, seed=2).cpu(), torch.tensor([0.017])
    match format:
        case "int8_wo":
            return Stored(random_codes(outputs, inputs, e4m3=False), bias, scales)
        case "fp8":
            return Stored(random_codes(outputs, inputs, e4m3=True), bias, torch.tensor([0.003]), scale)
        case "fp8_rowwise":  # bytes of E4M3 may be called INT8
            return Stored(random_codes(outputs, inputs, e4m3=True).view(torch.int8), bias, scales)
        case "int8_sq":
            prequant = torch.rand(inputs, generator=torch.Generator().manual_seed(5)) + 0.5
            return Stored(random_codes(outputs, inputs, e4m3=False), bias, scales, scale, prequant)
        case "w4a8":
            return w4a8_layer()[0]
        case _:
            return tiled_nvfp4(outputs, inputs)


def tiled_nvfp4(outputs: int, inputs: int) -> Stored:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // 16, generator=generator) * 448).to(torch.float8_e4m3fn)
    bias = torch.randn(outputs, generator=generator)
    return Stored(weight, bias, scales, torch.tensor([0.005]), None, torch.tensor([2e-4]))


def on_the_gpu(monkeypatch: pytest.MonkeyPatch, *, e4m3: bool) -> None:
    """Layers take the kernels of this machine."""
    for module in (byte_cuda, int4_tiled, nvfp4_tiled):
        monkeypatch.setattr(module, "products_for", lambda device: products(e4m3=e4m3))
        monkeypatch.setattr(module, "rounding_for", lambda device: rounding())


def is_near(format: str, outputs: int, inputs: int, rows: int) -> bool:
    kernel, reference = LAYERS[format]
    stored, x = layer(format, outputs, inputs), randn(rows, inputs, dtype=torch.bfloat16)
    found = computed(kernel, stored, x, outputs)
    assert found.dtype is torch.bfloat16
    exact = computed(reference, stored, x.float().cpu(), outputs).double()
    return error(found.cpu(), exact) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", LAYERS)
def test_layers_by_the_kernels(format: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_gpu(monkeypatch, e4m3=True)
    assert is_near(format, 64, 256, rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", ["fp8", "fp8_rowwise"])
def test_gpus_that_do_not_convert_e4m3(format: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_gpu(monkeypatch, e4m3=False)
    assert is_near(format, 64, 256, rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format", ["int8_wo", "fp8", "fp8_rowwise", "int8_sq", "nvfp4"])
def test_sizes_that_fill_no_program(format: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4 then holds its weights in the compute type."""
    on_the_gpu(monkeypatch, e4m3=True)
    assert is_near(format, 36, 304, rows)


@pytest.mark.parametrize("format", LAYERS)
def test_layers_by_torch(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (byte_cuda, int4_tiled, nvfp4_tiled):
        monkeypatch.setattr(module, "products_for", lambda device: None)
    assert is_near(format, 64, 256, 3)


@pytest.mark.parametrize("inputs", [96, 192, 1280])
def test_nvfp4_in_tiles_of_fewer_inputs_and_in_splits(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_tiled, "products_for", lambda device: products(100))
    monkeypatch.setattr(nvfp4_tiled, "rounding_for", lambda device: rounding())
    for rows in (1, 20, 70):
        assert is_near("nvfp4", 192, inputs, rows)


@pytest.mark.parametrize("processors", [1, 100])
def test_codes_in_splits_of_the_inputs(processors: int) -> None:
    """Counters are left as they were found."""
    weight, kernels = random_codes(192, 9 * 128 + 16, e4m3=False).to(DEVICE), products(processors)
    scales, counters = torch.rand(192).to(DEVICE), kernels.new_counters(192)
    for rows in (5, 70):
        x, factors = randn(rows, 9 * 128 + 16, dtype=torch.bfloat16), torch.rand(rows).to(DEVICE)
        exact = x.double() @ weight.double().t() * scales.double() * factors.double().unsqueeze(1)
        assert error(kernels.codes(x, weight, scales, None, counters, factors), exact) < TOLERANCES[torch.bfloat16]
        assert not counters.any()
    assert kernels.codes(x[:0], weight, scales, None, counters).shape == (0, 192)


@pytest.mark.parametrize("format", LAYERS)
def test_weights_of_many_rows_are_expanded_in_slices(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_gpu(monkeypatch, e4m3=True)
    monkeypatch.setattr(cuda_products, "MOST_EXPANDED", 64 * 256)
    monkeypatch.setattr(byte_cuda, "_MOST_SUMMED", 50)
    outputs = 64 if format == "w4a8" else 192
    assert is_near(format, outputs, 256, MOST_ROWS + 1)


@pytest.mark.parametrize("format", LAYERS)
def test_a_bias_is_left_to_the_caller(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a layer of which each rank computes a part of the sums."""
    on_the_gpu(monkeypatch, e4m3=True)
    kernel, stored, x = LAYERS[format][0], layer(format, 64, 256), randn(3, 256, dtype=torch.bfloat16)
    packed = {f"m.{name}": each for name, each in kernel.pack(stored, x.dtype).items()}
    place = Placement(DEVICE, x.dtype)
    with_bias, without = (
        kernel.load(Weights.of(packed), "m", (64, 256), place, bias=wanted)(x).double() for wanted in (True, False)
    )
    assert stored.bias is not None
    assert error(without + stored.bias.to(DEVICE).double(), with_bias) < TOLERANCES[torch.bfloat16]


def test_every_code_is_its_number() -> None:
    codes = torch.arange(256).to(torch.uint8).view(1, 256).to(DEVICE)
    kernels = products()
    assert torch.equal(kernels.expand_codes(codes.view(torch.int8)).float(), codes.view(torch.int8).float())
    known = codes[codes & 127 != 127].view(1, 254)
    numbers = from_e4m3(known.view(torch.float8_e4m3fn).cpu(), torch.float32).to(DEVICE)
    for converts in (False, True):
        assert torch.equal(products(e4m3=converts).expand_codes(known).float(), numbers)


def test_nvfp4_values_are_exact() -> None:
    """Every code with every scale that is no NaN."""
    scales = torch.arange(128, dtype=torch.uint8)
    scales[127] = 0
    blocks = scales.view(64, 2).view(torch.float8_e4m3fn)
    nibbles = torch.arange(16, dtype=torch.uint8)
    weight = (nibbles[::2] | (nibbles[1::2] << 4)).repeat(64, 2)
    exact = torch.tensor(E2M1_VALUES).repeat(64, 2) * blocks.float().repeat_interleave(16, dim=1)
    assert torch.equal(from_e2m1(weight) * blocks.float().repeat_interleave(16, dim=1), exact)
    tiles, tiled = nvfp4_tiled.tiles_of(weight, 32), nvfp4_tiled.blocks_of(blocks, 32)
    assert torch.equal(nvfp4_tiled.values_of(tiles, tiled), exact)
    found = products().expand_nvfp4(tiles.to(DEVICE), tiled.to(DEVICE))
    assert torch.equal(found.float().cpu(), exact)


@pytest.mark.parametrize("inputs", [32, 192, 384])
def test_values_in_tiles_are_those_that_were_packed(inputs: int) -> None:
    stored = tiled_nvfp4(128, inputs)
    group = nvfp4_tiled._group(inputs)
    assert stored.weights_scale is not None
    values = nvfp4_tiled.values_of(
        nvfp4_tiled.tiles_of(stored.weight, group), nvfp4_tiled.blocks_of(stored.weights_scale, group)
    )
    scales = stored.weights_scale.float().repeat_interleave(16, dim=1)
    assert torch.equal(values, from_e2m1(stored.weight) * scales)
