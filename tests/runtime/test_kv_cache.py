import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, storage_dtype

TOKENS, VECTORS, SIZE = 8, 2, 4


def written_and_read(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """(8, 2, 4) values after they were in an INT8 cache of two blocks, written to its slots in another order."""
    storage = torch.zeros(2, TOKENS // 2, VECTORS, SIZE, dtype=storage_dtype("int8", dtype))
    cache = LayerCache(storage, scale, dtype, Scratch())
    slots = torch.tensor([3, 1, 0, 2, 7, 6, 4, 5])
    cache.write(slots, values)
    assert not cache.exact
    return cache.read(torch.tensor([0, 1]))[slots]


@given(st.integers(0, 1000), st.sampled_from([0.001, 0.0125, 0.3]))
def test_int8_errors_are_half_a_step_at_most(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(TOKENS, VECTORS, SIZE, generator=generator) * 2 - 1) * 127 * scale
    read = written_and_read(values, scale, torch.float32)
    assert float((read - values).abs().max()) <= 0.5 * scale * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_holds_multiples_of_the_scale_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(-32, 32).view(TOKENS, VECTORS, SIZE) * 3
    values = (codes * 0.125).to(dtype)
    read = written_and_read(values, 0.125, dtype)
    assert read.dtype is dtype
    assert torch.equal(read, values)


def test_int8_saturates() -> None:
    values = torch.full((TOKENS, VECTORS, SIZE), 1e6)
    values[:, 0] = -1e6
    read = written_and_read(values, 0.5, torch.float32)
    assert read[:, 0].unique().tolist() == [-64.0]
    assert read[:, 1].unique().tolist() == [63.5]


def test_a_cache_of_the_compute_type_is_exact() -> None:
    storage = torch.zeros(1, TOKENS, VECTORS, SIZE, dtype=storage_dtype("none", torch.float32))
    cache = LayerCache(storage, None, torch.float32, Scratch())
    values = torch.randn(TOKENS, VECTORS, SIZE)
    cache.write(torch.arange(TOKENS), values)
    assert cache.exact
    assert torch.equal(cache.read(torch.tensor([0])), values)
