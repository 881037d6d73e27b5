"""Memory in large pages: zeros that nobody else has, freed with the tensors in it."""

import gc
import mmap
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trtforge.runtime.native import pages
from trtforge.runtime.native.pages import own_pages, shared_pages
from trtforge.runtime.native.tiles import pack_bfloat16, pack_bytes, pack_float32


def ranges_of(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)


def assert_apart(tensors: list[Tensor]) -> None:
    ranges = ranges_of(tensors)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_tensors_are_zeros_apart_from_each_other(shapes: list[list[int]], dtype: torch.dtype) -> None:
    made = [shared_pages(shape, dtype) for shape in shapes] + [own_pages(shapes[0], dtype)]
    for index, tensor in enumerate(made):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(index + 1)
    for index, (tensor, shape) in enumerate(zip(made, [*shapes, shapes[0]], strict=True)):
        assert tensor.shape == tuple(shape)
        assert tensor.dtype is dtype
        assert tensor.eq(index + 1).all()
    assert_apart(made)


def test_small_tensors_lie_side_by_side_and_large_ones_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SHARED", pages._Shared())
    monkeypatch.setattr(pages, "_REGION", 1 << 20)
    small = [shared_pages((100_001,), torch.int8) for _ in range(11)]
    begins = [begin for begin, _ in ranges_of(small[:10])]
    assert {after - before for before, after in pairwise(begins)} == {100_032}
    large = shared_pages(((1 << 19) + 1,), torch.int8)
    assert_apart([*small, large])
    next_small = shared_pages((64,), torch.int8)
    assert next_small.data_ptr() == small[10].data_ptr() + 100_032, "the large one left the region as it was"


def test_large_tensors_reach_their_next_large_page_at_different_times() -> None:
    page, count = 2 << 20, 8
    tensors = [own_pages((page * 16,), torch.int8) for _ in range(count)]
    before = sorted(-each.data_ptr() % page for each in tensors)  # bytes up to the first border of large pages
    gaps = [after - earlier for earlier, after in pairwise([*before, before[0] + page])]
    assert min(gaps) > page // count // 2
    assert max(gaps) < page // count * 2
    assert all(each.data_ptr() % 4096 == 0 for each in tensors)
    assert not any(each.any() for each in tensors)
    assert_apart(tensors)


def test_memory_is_freed_with_the_last_tensor_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = pages._Shared()
    monkeypatch.setattr(pages, "_SHARED", shared)
    first, second = shared_pages((8,), torch.int8), shared_pages((8,), torch.int8)
    assert shared._last is not None
    del first
    gc.collect()
    assert isinstance(shared._last(), mmap.mmap)
    second.fill_(1)
    del second
    gc.collect()
    assert shared._last() is None
    assert not shared_pages((8,), torch.int8).any()


def test_threads_get_memory_of_their_own() -> None:
    made: list[Tensor] = []

    def make(value: int) -> None:
        for _ in range(200):
            made.append(shared_pages((33,), torch.int8).fill_(value))

    threads = [threading.Thread(target=make, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 800
    assert all(tensor.eq(int(tensor[0])).all() for tensor in made)
    assert_apart(made)


def test_systems_without_large_pages_give_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert own_pages((3, 5), torch.float32).shape == (3, 5)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not own_pages((3, 5), torch.float32).any()


def test_packed_weights_are_in_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SHARED", pages._Shared())
    before = shared_pages((64,), torch.int8)
    packed = [
        pack_bfloat16(torch.randn(64, 8).bfloat16()),
        pack_float32(torch.randn(40, 8)),
        pack_bytes(torch.randint(-9, 9, (32, 8), dtype=torch.int8)),
    ]
    assert all(0 < tensor.data_ptr() - before.data_ptr() < pages._REGION for tensor in packed)
