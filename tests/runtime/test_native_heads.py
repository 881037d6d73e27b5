"""Products and copies of parts of heads, with every set of instructions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.kernel_levels import LEVELS, kernels_at
from trtforge.runtime.native.heads import copy_heads, project_heads

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of the sum of the absolute products: sums in another order, and the rounding of the result."""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 14) | st.sampled_from([95, 96, 97, 200]),
    heads=st.integers(1, 4),
    inputs=st.integers(1, 40) | st.sampled_from([127, 128, 129, 300]),
    outputs=st.integers(1, 70),
    around=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    seed=st.integers(0, 2**16),
)
def test_products_of_each_head(
    level: str, dtype: torch.dtype, rows: int, heads: int, inputs: int, outputs: int, around: tuple[int, int], seed: int
) -> None:
    """Of slices, into slices: what lies beside them stays."""
    generator = torch.Generator().manual_seed(seed)
    before, after = around
    x = torch.randn(rows, heads + 1, before + inputs + after, generator=generator).to(dtype)
    weight = torch.randn(heads, inputs, outputs, generator=generator).to(dtype)
    y = torch.full((rows, heads + 2, after + outputs + before), 7.0, dtype=dtype)
    given, made = x[:, 1:, before : before + inputs], y[:, :heads, after : after + outputs]
    project_heads(kernels_at(level), given, weight, made)
    expected = torch.einsum("thi,hio->tho", given.double(), weight.double())
    most = torch.einsum("thi,hio->tho", given.double().abs(), weight.double().abs())
    assert bool(((made.double() - expected).abs() <= CLOSE[dtype] * most).all())
    made.fill_(7.0)
    assert bool((y == 7.0).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", CLOSE)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 5) | st.just(700), heads=st.integers(1, 4), size=st.integers(1, 80), beside=st.integers(0, 5)
)
def test_copies_of_parts_of_heads(
    level: str, dtype: torch.dtype, rows: int, heads: int, size: int, beside: int
) -> None:
    x = torch.arange(rows * (heads + 1) * (size + beside), dtype=torch.float32).remainder(251).to(dtype)
    x = x.view(rows, heads + 1, size + beside)
    y = torch.full((rows, heads, size + 2 * beside), -1.0, dtype=dtype)
    copy_heads(kernels_at(level), x[:, 1:, beside:], y[..., beside : beside + size])
    assert torch.equal(y[..., beside : beside + size], x[:, 1:, beside:])
    assert bool((y[..., :beside] == -1.0).all())
    assert bool((y[..., beside + size :] == -1.0).all())
