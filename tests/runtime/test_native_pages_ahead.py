"""Pages of KV blocks are made before they are written, and what they hold stays."""

import mmap
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.patience import PATIENCE
from tests.runtime.checkpoints import tiny_llama, write_checkpoint, write_engine
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.runtime.native import pages_ahead
from trtforge.runtime.native.pages import own_pages
from trtforge.runtime.native.pages_ahead import PagesAhead
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.batch import Step

BLOCK = 256 << 10
AHEAD = 16
"""Blocks of 4 MiB."""


def made(tensor: Tensor, blocks: int) -> list[bool]:
    """Whether the pages of each of the first blocks are in memory, as /proc says: bit 63 of an entry for 4 KiB."""
    found = []
    with Path("/proc/self/pagemap").open("rb", buffering=0) as entries:
        for block in range(blocks):
            entries.seek((tensor.data_ptr() + block * BLOCK + BLOCK // 2) // mmap.PAGESIZE * 8)
            found.append(bool(int.from_bytes(entries.read(8), "little") >> 63))
    return found


def layers(blocks: int) -> list[Tensor]:
    """In small pages, so that each block has its own."""
    return [torch.frombuffer(mmap.mmap(-1, blocks * BLOCK), dtype=torch.uint8).view(blocks, BLOCK) for _ in range(2)]


def reached(pages: PagesAhead, blocks: int, rows: int = 1) -> bool:
    """Whether something is made, which is waited for."""
    thread = pages.reach(blocks, rows)
    if thread is not None:
        thread.join(60)
    return thread is not None


def test_blocks_in_use_and_those_that_follow_are_made_from_the_second_step_on() -> None:
    """A long prompt has blocks that later steps write to."""
    tensors = layers(64)
    pages = PagesAhead(tensors)
    assert not reached(pages, 1)
    assert not any(made(tensors[0], 64))
    assert reached(pages, 2)
    for tensor in tensors:
        assert made(tensor, 64) == [block < 2 + AHEAD for block in range(64)]
    assert not reached(pages, 2 + AHEAD // 2), "half of them are left"
    assert reached(pages, 3 + AHEAD // 2)
    for tensor in tensors:
        assert made(tensor, 64) == [block < 3 + AHEAD // 2 + AHEAD for block in range(64)]


def test_many_rows_may_each_come_to_their_next_block_twice() -> None:
    tensors = layers(64)
    pages = PagesAhead(tensors)
    reached(pages, 0)
    assert reached(pages, 4, rows=20)
    assert made(tensors[1], 64) == [block < 44 for block in range(64)]


def test_nothing_is_made_beyond_the_last_block() -> None:
    tensors = layers(10)
    pages = PagesAhead(tensors)
    reached(pages, 1)
    assert reached(pages, 4)
    assert made(tensors[0], 10) == [True] * 10
    assert not reached(pages, 9)
    assert not reached(pages, 10)
    for empty in ([], [torch.empty(4, 0)], [torch.empty(0, 4)]):
        pages = PagesAhead(empty)
        assert not reached(pages, 1)
        assert not reached(pages, 3)


def test_contents_stay() -> None:
    cache = own_pages((40, BLOCK), torch.uint8)
    cache[:20] = 7
    pages = PagesAhead([cache])
    reached(pages, 1)
    assert reached(pages, 3)
    assert (cache[:20] == 7).all()
    assert not cache[20:].any()


def test_a_system_without_the_call_makes_pages_at_their_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "_madvise", lambda: None)
    tensors = layers(8)
    pages = PagesAhead(tensors)
    reached(pages, 1)
    assert reached(pages, 2)
    assert not any(made(tensors[0], 8))


def test_steps_go_on_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pages = PagesAhead(layers(8))
    reached(pages, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert not reached(pages, 2)


def test_a_rank_names_the_blocks_that_its_steps_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = []
    monkeypatch.setattr(PagesAhead, "reach", lambda self, blocks, rows: named.append((blocks, rows)))
    checkpoint = write_checkpoint(tiny_llama(), tmp_path / "checkpoint")
    ranks = ThreadRanks(open_engine(write_engine(checkpoint, tmp_path / "engine", tokens_per_block=8)), 6)
    one = np.array([1])
    ranks.execute(Step(np.array([0]), np.array([9]), one, np.array([[1, 4]]), np.arange(3, 12)))
    ranks.execute(
        Step(np.array([9, 0]), np.array([1, 1]), np.array([1, 1]), np.array([[1, 4], [0, 0]]), np.array([3, 4]))
    )
    assert named == [(5, 1), (0, 0), (5, 2), (0, 0)], "of all layers, then of those with windows"
    step = Step(np.array([10]), one, one, np.array([[1, 4]]), np.array([5]))
    content = ranks.models[0].block_content(1)
    ranks.execute(step, {3: content, 5: content})
    assert named[4] == (6, 1), "blocks that are restored before a sequence has them"
    ranks.close()


def test_a_process_may_end_while_pages_are_made() -> None:
    """Of so many layers that the thread is among them at the end."""
    program = (
        "import sys, torch\n"
        "from trtforge.runtime.native.pages_ahead import PagesAhead\n"
        "pages = PagesAhead([torch.zeros(64, 4096)] * 100_000)\n"
        "pages.reach(1, 1)\n"
        "assert pages.reach(2, 1).is_alive()\n"
        "sys.exit(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (3, "")
