"""Checks of whole tensors."""

import pytest
import torch

from trtforge.models.torch_tensors import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 17, 1023])
def test_one_element_that_is_no_number_is_seen(dtype: torch.dtype, place: int) -> None:
    tensor = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert all_finite(tensor.view(32, 32))
    for value in (torch.nan, torch.inf, -torch.inf):
        tensor[place] = value
        assert not all_finite(tensor.view(32, 32))


def test_a_sum_that_overflows_is_no_fault() -> None:
    assert all_finite(torch.full((1024,), 60000.0, dtype=torch.float16))
    assert all_finite(torch.full((1024,), torch.finfo(torch.float32).max))
    assert not all_finite(torch.tensor([torch.inf, -torch.inf, 1.0]))


def test_nothing_is_finite() -> None:
    assert all_finite(torch.empty(0, 8))
