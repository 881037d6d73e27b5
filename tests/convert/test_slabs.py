"""Slabs come in the order of their use, hold the rows that were asked for, and stay until the next is taken."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file

from trtforge.convert.slabs import Read, Slabs, piece_reads, union
from trtforge.core.errors import ForgeError
from trtforge.formats.shards import StoredTensor, read_header
from trtforge.formats.source_digest import SourceDigests
from trtforge.models.content import Cast, Piece
from trtforge.models.split import Cut

ROWS, COLUMNS = 40, 6
TABLE = torch.arange(ROWS * COLUMNS, dtype=torch.int16).view(ROWS, COLUMNS)

rows = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda ends: range(min(ends), max(ends)))
cuts = st.lists(rows.filter(len), min_size=1, max_size=4).map(
    lambda found: tuple(Cut((part,), range(COLUMNS)) for part in found)
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredTensor]:
    path = tmp_path_factory.mktemp("slabs") / "a.safetensors"
    save_file({"t": TABLE, "transposed": TABLE.T.contiguous()}, path)
    return {tensor.spec.name: tensor for tensor in read_header(path)}


def piece(name: str, cuts: tuple[Cut, ...]) -> Piece:
    return Piece(name, (), cuts, transposed=name == "transposed")


@given(cuts=cuts, name=st.sampled_from(["t", "transposed"]), size=st.integers(1, 200))
def test_every_wanted_row_comes_once(
    sources: dict[str, StoredTensor], cuts: tuple[Cut, ...], name: str, size: int
) -> None:
    wanted = piece(name, cuts)
    found: dict[int, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtforge.convert.slabs.SLAB_BYTES", size)
        patch.setattr("trtforge.convert.slabs.COLUMN_BLOCK_BYTES", size)
        with Slabs([Cast((wanted,), ())], sources, SourceDigests(sources)) as slabs:
            for read in piece_reads(wanted, sources):
                slab = slabs.take(read)
                assert len(read.rows) == len(slab) <= max(2, size // (COLUMNS * 2))
                assert not found.keys() & set(read.rows)
                found |= {row: slab[number].tolist() for number, row in enumerate(read.rows)}
    assert found == {row: TABLE[row].tolist() for cut in cuts for part in cut.rows for row in part}


def test_a_slab_stays_until_the_next_is_taken(
    sources: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtforge.convert.slabs.SLAB_BYTES", 2 * COLUMNS * 2)
    wanted = piece("t", (Cut((range(ROWS),), range(COLUMNS)),))
    with Slabs([Cast((wanted,), ())], sources, SourceDigests(sources)) as slabs:
        for read in piece_reads(wanted, sources):
            slab = slabs.take(read)
            slabs._thread.submit(int).result()  # all that may be read ahead was read
            assert np.array_equal(slab, TABLE[read.rows.start : read.rows.stop].numpy())


def test_a_slab_is_released_before_it_is_overwritten(
    sources: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtforge.convert.slabs.SLAB_BYTES", 2 * COLUMNS * 2)
    wanted = piece("t", (Cut((range(ROWS),), range(COLUMNS)),))
    taken: list[tuple[Read, NDArray[Any]]] = []
    released = []

    def release() -> None:
        for read, slab in taken[-1:]:
            assert np.array_equal(slab, TABLE[read.rows.start : read.rows.stop].numpy())
            released.append(read)

    with Slabs([Cast((wanted,), ())], sources, SourceDigests(sources), release=release) as slabs:
        for read in piece_reads(wanted, sources):
            slab = slabs.take(read)
            slabs._thread.submit(int).result()  # all that may be read ahead was read
            taken.append((read, slab))
    assert released == [read for read, _ in taken[:-1]]


def test_another_order_is_a_defect(sources: dict[str, StoredTensor]) -> None:
    wanted = piece("t", (Cut((range(ROWS),), range(COLUMNS)),))
    with (
        Slabs([Cast((wanted,), ())], sources, SourceDigests(sources)) as slabs,
        pytest.raises(AssertionError, match="was taken where"),
    ):
        slabs.take(Read("t", range(3)))


def test_an_error_of_the_reading_thread_is_raised_here(tmp_path: Path) -> None:
    save_file({"t": TABLE}, tmp_path / "a.safetensors")
    sources = {tensor.spec.name: tensor for tensor in read_header(tmp_path / "a.safetensors")}
    (tmp_path / "a.safetensors").unlink()
    wanted = piece("t", (Cut((range(ROWS),), range(COLUMNS)),))
    with (
        Slabs([Cast((wanted,), ())], sources, SourceDigests(sources)) as slabs,
        pytest.raises(ForgeError, match=r"a\.safetensors: No such file or directory"),
    ):
        slabs.take(next(piece_reads(wanted, sources)))


def test_ranges_that_touch_or_overlap_are_read_as_one() -> None:
    found = union(
        (Cut((range(0, 4), range(10, 12)), range(1)), Cut((range(4, 6),), range(1)), Cut((range(5, 7),), range(1)))
    )
    assert found == [range(0, 7), range(10, 12)]
