"""The float32 kernels against products in float64, and whole answers against transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.runtime.kernel_levels import LEVELS, kernels_at
from trtforge.runtime.linears.linear import matrix
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.native.float32 import linear
from trtforge.runtime.native.tiles import pack_float32

EXACT = 1e-6
"""Of the sum of the products' sizes."""


@settings(max_examples=60)
@given(
    rows=st.integers(0, 130) | st.integers(180, 210),
    inputs=st.integers(1, 70) | st.sampled_from([256, 1023, 1024, 1030, 2100]),
    outputs=st.integers(1, 100),
    biased=st.booleans(),
    seed=st.integers(0, 9),
)
def test_products(rows: int, inputs: int, outputs: int, biased: bool, seed: int) -> None:
    """Of any sizes: blocks of rows, panels of rows, parts of the inputs and the last tile that is not full."""
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    sizes = functional.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())  # sums may cancel each other
    for kernels in map(kernels_at, LEVELS):  # those of TILES have vectors of four numbers, as ARM processors do
        made = linear(kernels, x, pack_float32(weight), bias, outputs)
        assert made.shape == (rows, outputs)
        assert made.dtype is torch.float32
        assert ((made - exact).abs() <= EXACT * sizes).all()


def test_a_slice_of_rows_and_more_dimensions() -> None:
    x, weight = torch.randn(4, 6, 40), torch.randn(33, 20)
    for kernels in map(kernels_at, LEVELS):  # those of TILES have vectors of four numbers, as ARM processors do
        made = linear(kernels, x[:, ::2, 10:30], pack_float32(weight), None, 33)
        assert torch.allclose(made, x[:, ::2, 10:30] @ weight.t(), atol=1e-5)


def test_numbers_of_another_row_or_output_change_nothing() -> None:
    """Not-a-number stays in its row and its output."""
    kernels, x, weight = kernels_at(LEVELS[0]), torch.randn(14, 50), torch.randn(40, 50)
    expected = linear(kernels, x, pack_float32(weight), None, 40)
    x[3, 7], weight[35, 2] = float("nan"), float("inf")
    made = linear(kernels, x, pack_float32(weight), None, 40)
    assert made[3].isnan().all()
    assert not made[:, 35].isfinite().any()
    kept = [row for row in range(14) if row != 3]
    assert torch.equal(made[kept][:, :35], expected[kept][:, :35])


def test_products_take_float32() -> None:
    with pytest.raises(TypeError, match=r"the products are for float32, not torch\.bfloat16"):
        linear(kernels_at(LEVELS[0]), torch.ones(1, 4).bfloat16(), pack_float32(torch.ones(32, 4)), None, 32)


def test_torch_multiplies_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(10, 24), torch.randn(10), torch.randn(3, 24)
    by_kernels = matrix(weight, bias)(x)
    monkeypatch.setenv(VARIABLE, "torch")
    by_torch = matrix(weight, bias)(x)
    assert torch.equal(by_torch, functional.linear(x, weight, bias))
    assert torch.allclose(by_kernels, by_torch, atol=1e-5)
