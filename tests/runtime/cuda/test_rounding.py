"""Activations that a Triton kernel rounds are the numbers that torch's operations give."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.runtime.cuda.kernels import DEVICE, rounding
from trtforge.runtime.linears.float8 import round_to_e4m3
from trtforge.runtime.linears.fp8_rowwise_linear import token_scales
from trtforge.runtime.linears.int8 import round_to_int8
from trtforge.runtime.linears.nvfp4_linear import round_to_nvfp4

REFERENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "e4m3": round_to_e4m3,
    "int8": round_to_int8,
    "nvfp4": round_to_nvfp4,
}


def inputs(rows: int, size: int) -> Tensor:
    """Numbers of many sizes, some beyond what the formats hold, and a row of zeros."""
    generator = torch.Generator().manual_seed(rows + size)
    x = (
        torch.randn(rows, size, generator=generator)
        * torch.logspace(-4, 2, size)[torch.randperm(size, generator=generator)]
    )
    x[0, :16] = 0.0
    x[-1] = 0.0 if rows > 1 else x[-1]
    return x.to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("format", REFERENCES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 1008), (5, 2064)])
@pytest.mark.parametrize("prescaled", [False, True])
def test_numbers_of_a_format(format: str, rows: int, size: int, prescaled: bool) -> None:
    x, scale = inputs(rows, size), torch.tensor([0.0123], device=DEVICE)
    factors = torch.rand(size, generator=torch.Generator().manual_seed(1)).to(DEVICE) + 0.5 if prescaled else None
    expected = REFERENCES[format](x.float() if factors is None else x * factors, scale)
    found = rounding()(x, format, scale, factors)  # type: ignore[arg-type]
    assert found.dtype is torch.bfloat16
    assert torch.equal(found.float(), expected.float())


def test_int8_and_e4m3_saturate() -> None:
    x, one = torch.tensor([[1e9, -1e9, 0.0, 2.5]], device=DEVICE, dtype=torch.bfloat16), torch.ones(1, device=DEVICE)
    assert rounding()(x, "int8", one).tolist() == [[127.0, -128.0, 0.0, 2.0]]
    assert rounding()(x, "e4m3", one).tolist() == [[448.0, -448.0, 0.0, 2.5]]


@pytest.mark.parametrize(("rows", "size"), [(1, 40), (4, 1500)])
def test_each_row_with_its_own_scale(rows: int, size: int) -> None:
    x = inputs(rows, size)
    expected = token_scales(x)
    found, scales = rounding().by_row(x, float(token_scales(torch.zeros(1, 1))))
    assert torch.equal(scales, expected.squeeze(1))
    assert torch.equal(found.float(), round_to_e4m3(x, expected))


def test_rows_of_a_wider_tensor_and_none() -> None:
    x, scale = inputs(3, 96)[:, 16:80], torch.tensor([0.5], device=DEVICE)
    assert torch.equal(rounding()(x, "e4m3", scale).float(), round_to_e4m3(x, scale))
    assert rounding()(x[:0], "int8", scale).shape == (0, 64)
