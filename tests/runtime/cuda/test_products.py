"""Products of few rows by Triton kernels, and the tiles of INT4 weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.cuda.kernels import DEVICE, fused, products
from tests.runtime.test_linear import computed, int4_layer
from trtforge.runtime.cuda import products as cuda_products
from trtforge.runtime.cuda.products import MOST_ROWS, TILE, _shape_for, readable
from trtforge.runtime.linears import int4_tiled
from trtforge.runtime.linears.int4_tiled import tiles_of, values_of

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 1024), (13, 2500), (3, 40)])
@pytest.mark.parametrize("many", [False, True])
def test_one_row(
    dtype: torch.dtype, biased: bool, outputs: int, inputs: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the programs of layers with few outputs and with many."""
    for name in ("_FEW_OUTPUTS", "_MANY_OUTPUTS"):
        monkeypatch.setattr(cuda_products, name, 0 if many else 4096)
    x, weight = randn(1, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=1)
    bias = randn(outputs, dtype=dtype, seed=2) if biased else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for stored in (dtype, torch.float32):
        found = products().one_row(x, weight, bias, stored)
        assert found.dtype is stored
        assert error(found, exact) < TOLERANCES[stored]


@pytest.mark.parametrize("few", [0, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 1024), (13, 4100)])
def test_one_row_of_codes(outputs: int, inputs: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the row and the weights are E4M3, whose products are exact."""
    monkeypatch.setattr(cuda_products, "_FEW_OUTPUTS", few)
    x, weight = (randn(*shape).to(torch.float8_e4m3fn) for shape in ((1, inputs), (outputs, inputs)))
    factor, bias = torch.tensor([0.3], device=DEVICE), randn(outputs, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t() * factor + bias.double()
    found = products().one_row(x, readable(weight), bias, torch.float32, None, factor)
    assert error(found, exact) < TOLERANCES[torch.float32]


def random_int4(outputs: int, inputs: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles, scales, and the values in float64."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = (torch.randint(1, 16, (inputs // group, outputs), generator=generator) / 64).bfloat16()  # of few digits
    values = codes.double() * scales.double().t().repeat_interleave(group, dim=1)
    return tiles_of(codes, inputs // group).to(DEVICE), scales.to(DEVICE), values.to(DEVICE)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 17, 65, MOST_ROWS])
def test_int4(rows: int, group: int) -> None:
    """Twice: the counters of splits are left as they were found."""
    tiles, scales, values = random_int4(192, 4 * group, group)
    x, bias = randn(rows, 4 * group, dtype=torch.bfloat16), randn(192, dtype=torch.bfloat16, seed=2)
    kernels = products()
    counters = kernels.new_counters(192)
    for added in (None, bias):
        exact = x.double() @ values.t() + (0 if added is None else added.double())
        assert error(kernels.int4(x, tiles, scales, added, counters), exact) < TOLERANCES[torch.bfloat16]
        assert not counters.any()


@pytest.mark.parametrize("processors", [1, 4, 100])
def test_int4_in_splits_of_the_inputs(processors: int) -> None:
    """More on larger GPUs; the last split has fewer groups than the others."""
    tiles, scales, values = random_int4(192, 33 * 32, 32)
    kernels = products(processors)
    assert [kernels._splits(_shape_for(rows), 3, 33) for rows in (1, 5, 64)] == {
        1: [8, 2, 1],
        4: [8, 4, 2],
        100: [8, 4, 4],
    }[processors]
    for rows in (1, 5, 64):
        x = randn(rows, 33 * 32, dtype=torch.bfloat16, seed=rows)
        found = kernels.int4(x, tiles, scales, None, kernels.new_counters(192))
        assert error(found, x.double() @ values.t()) < TOLERANCES[torch.bfloat16]


@given(st.integers(1, MOST_ROWS), st.integers(1, 4000), st.integers(1, 500), st.integers(1, 200))
def test_products_that_are_split_have_counters(rows: int, tiles: int, groups: int, processors: int) -> None:
    shape = _shape_for(rows)
    programs = -(-tiles * TILE // shape.outputs) * -(-rows // shape.rows)
    kernels = products(processors)
    splits = kernels._splits(shape, programs, groups)
    assert 1 <= splits <= max(1, groups)
    assert splits == 1 or programs <= len(kernels.new_counters(tiles * TILE))


def test_int4_of_one_row_that_is_scaled_first() -> None:
    tiles, scales, values = random_int4(64, 256, 64)
    x, factors = randn(1, 256, dtype=torch.bfloat16), randn(256, dtype=torch.bfloat16, seed=1)
    exact, kernels = (x * factors).double() @ values.t(), products()
    found = kernels.int4(x, tiles, scales, None, kernels.new_counters(192), factors)
    assert error(found, exact) < 2 * TOLERANCES[torch.bfloat16]


def test_int4_of_rows_of_a_wider_tensor() -> None:
    tiles, scales, values = random_int4(64, 256, 64)
    x = randn(5, 300, dtype=torch.bfloat16)[:, :256]
    kernels = products()
    counters = kernels.new_counters(192)
    assert error(kernels.int4(x, tiles, scales, None, counters), x.double() @ values.t()) < TOLERANCES[torch.bfloat16]
    assert kernels.int4(x[:0], tiles, scales, None, counters).shape == (0, 64)


@pytest.mark.parametrize("group", [32, 128])
def test_int4_weights_are_expanded(group: int) -> None:
    tiles, scales, values = random_int4(128, 4 * group, group)
    exact = values.to(torch.bfloat16)
    assert torch.equal(products().expand_int4(tiles, scales), exact)
    assert torch.equal(values_of(tiles, scales), exact)


@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS + 72])
def test_an_int4_layer_by_the_kernels(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias and a scale of its inputs, of one row, of few, and of so many that the weights are expanded."""
    monkeypatch.setattr(int4_tiled, "products_for", lambda device: products())
    monkeypatch.setattr(int4_tiled, "fused_for", lambda device, dtype: fused())
    stored, matrix = int4_layer()
    assert stored.bias is not None
    assert stored.prequant is not None
    x = randn(rows, 256, dtype=torch.bfloat16)
    exact = x.double().cpu() @ matrix.double().t() + stored.bias.double()
    found = computed(int4_tiled.Int4Tiled(), stored, x, 64)
    assert error(found.cpu(), exact) < 2 * TOLERANCES[torch.bfloat16]
