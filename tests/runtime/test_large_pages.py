"""Memory in large pages."""

import gc
import itertools
import mmap
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trtforge.runtime.native import large_pages
from trtforge.runtime.native.large_pages import PAGE, LargePages
from trtforge.runtime.native.tiles import pack_bfloat16, pack_bytes

DTYPES = (torch.int8, torch.bfloat16, torch.float32)
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000), st.sampled_from(DTYPES)), max_size=12))
def test_copies_are_contiguous_aligned_and_apart(shapes: list[tuple[int, int, torch.dtype]]) -> None:
    pages = LargePages()
    sources = [torch.randint(-100, 100, (columns, rows)).to(dtype).t() for rows, columns, dtype in shapes]
    copies = [pages.copy(tensor) for tensor in sources]
    assert all(copy.is_contiguous() and copy.data_ptr() % 64 == 0 for copy in copies if copy.numel())
    for copy, tensor in zip(copies, sources, strict=True):
        assert copy.dtype is tensor.dtype
        assert copy.equal(tensor)
    ends = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies if copy.numel())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))


def test_tensors_that_need_a_mapping_of_their_own() -> None:
    pages, large = LargePages(), torch.arange(40 * PAGE // 8)
    small = pages.copy(torch.arange(5))
    assert pages.copy(large).equal(large)
    assert pages.copy(large).data_ptr() % PAGE == 0
    assert small.tolist() == [0, 1, 2, 3, 4]


def test_a_mapping_is_freed_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    class Mapping(mmap.mmap):
        def __init__(self, *_: object, **__: object) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(large_pages.mmap, "mmap", Mapping)
    pages = LargePages()
    first, second = pages.copy(torch.zeros(9)), pages.copy(torch.zeros(9))
    pages.copy(torch.zeros(40 * PAGE, dtype=torch.int8))
    gc.collect()
    assert [mapping() is not None for mapping in made] == [False, True, True]  # the first one is empty
    del first, second, pages
    gc.collect()
    assert [mapping() is not None for mapping in made] == [False, False, False]


@pytest.mark.parametrize("pack", [pack_bfloat16, pack_bytes])
def test_packed_weights_are_in_pages_that_may_be_large(pack: Callable[[Tensor], Tensor]) -> None:
    weight = torch.ones(64, 32, dtype=torch.bfloat16 if pack is pack_bfloat16 else torch.int8)
    flags = flags_at(pack(weight).data_ptr())
    assert ("hg" in flags) is THP.exists()


def test_a_kernel_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_ADVICE", 0x7FFF)  # which no kernel knows
    assert LargePages().copy(torch.arange(9)).tolist() == list(range(9))


def flags_at(address: int) -> list[str]:
    """The flags of the mapping with this address, as /proc/self/smaps has them."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:#x}")
