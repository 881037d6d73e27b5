"""Sums over ranks in shared memory: the same bits on every rank, whatever the sizes, types and number of ranks."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.patience import PATIENCE
from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint
from tests.runtime.test_recorded import SEQUENCES, TOLERANCES, begun, stepped
from trtforge.core.dtypes import ModelDtype
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.recorder import Arena, recording
from trtforge.runtime.ranks.rank_model import RankModel
from trtforge.runtime.ranks.shared_sums import SharedSums

PART_BYTES = 1 << 17
SIZES = st.sampled_from((0, 1, 5, 16, 33, 4096, PART_BYTES // 4 - 1, PART_BYTES // 4, PART_BYTES // 2 + 17, 200_003))


def added_up(sums: SharedSums, calls: list[list[Tensor]], stage: int = 0) -> list[list[Tensor]]:
    """What each rank, a thread, gets of its values in each call: calls[call][rank]."""

    def run(rank: int) -> list[Tensor]:
        made = [values[rank].clone() for values in calls]
        for each in made:
            sums.add_up(each, stage, rank)
        return made

    with ThreadPoolExecutor(len(calls[0])) as pool:
        return list(pool.map(run, range(len(calls[0]))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_gets_the_sum_in_the_order_of_ranks(level: Native, ranks: int, dtype: torch.dtype) -> None:
    sums = SharedSums(level, ranks, 1)

    @settings(max_examples=8)
    @given(sizes=st.lists(SIZES, min_size=1, max_size=4), seed=st.integers(0, 1 << 30))
    def check(sizes: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        calls = [[torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)] for size in sizes]
        made = added_up(sums, calls)
        for call, values in enumerate(calls):
            expected = torch.zeros(sizes[call])
            for each in values:
                expected += each.float()
            for rank in range(ranks):
                assert torch.equal(made[rank][call], expected.to(dtype))

    check()


def test_stages_are_apart(level: Native) -> None:
    sums = SharedSums(level, 2, 3)
    calls = [[torch.full((40,), float(value)) for value in (1, 2)]]
    with ThreadPoolExecutor(3) as pool:
        for made in pool.map(lambda stage: added_up(sums, [[each * 10**stage for each in calls[0]]], stage), range(3)):
            assert torch.equal(made[0][0], made[1][0])
            assert made[0][0][0] in (3.0, 30.0, 300.0)


def test_nobody_waits_for_a_rank_that_ended(level: Native) -> None:
    sums = SharedSums(level, 2, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sums.add_up, torch.ones(10), 0, 0)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        sums.end()
        with pytest.raises(RuntimeError, match="a rank ended"):
            waiting.result(timeout=PATIENCE)


ONE_RANK = """
import sys
import torch
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.ranks.shared_sums import SharedSums

sums = SharedSums.of(Placement(torch.device("cpu"), torch.float32), 2, 1, int(sys.argv[1]))
values = 2 * torch.arange(100_000.0)
for _ in range(20):
    sums.add_up(values, 0, 1)
print(torch.equal(values, torch.arange(100_000.0) * 3 * 2**19))
"""


def test_ranks_are_processes() -> None:
    """After the first sum both have the same numbers, so each of the others doubles them."""
    sums = SharedSums.of(Placement(torch.device("cpu"), torch.float32), 2, 1)
    assert sums is not None
    command, descriptor = [sys.executable, "-c", ONE_RANK, str(sums.descriptor)], sums.descriptor
    with subprocess.Popen(command, pass_fds=(descriptor,), stdout=subprocess.PIPE, text=True) as other:
        values = torch.arange(100_000.0)
        for _ in range(20):
            sums.add_up(values, 0, 0)
        assert torch.equal(values, torch.arange(100_000.0) * 3 * 2**19)
        assert other.communicate(timeout=PATIENCE)[0] == "True\n"


def test_single_ranks_and_other_devices_share_nothing() -> None:
    assert SharedSums.of(Placement(torch.device("cpu"), torch.float32), 1, 4) is None
    assert SharedSums.of(Placement(torch.device("meta"), torch.float32), 2, 1) is None
    assert SharedSums.of(Placement(torch.device("cpu"), torch.float16), 2, 1) is None


def test_ranks_do_without_memory_that_the_system_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert SharedSums.of(Placement(torch.device("cpu"), torch.float32), 2, 1) is None
    assert "over the loopback interface, slower: no shared memory: Function not implemented" in caplog.text


def test_a_python_without_memory_files_has_a_file_in_memory(level: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    first = SharedSums(level, 2, 1)
    second = SharedSums(level, 2, 1, first.descriptor)
    values = [torch.full((5,), 1.0), torch.full((5,), 2.0)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: (first, second)[rank].add_up(values[rank], 0, rank), range(2)))
    assert [each.tolist() for each in values] == [[3.0] * 5] * 2


def test_a_sum_is_recorded(level: Native) -> None:
    sums, values = SharedSums(level, 1, 1), torch.arange(50.0)
    with recording(Arena()) as recorder:
        sums.add_up(values, 0, 0)
    calls, _ = recorder.calls()
    assert len(calls) == 1


def rows_of(rank: RankModel) -> tuple[int, ...]:
    """Rows of the steps that a rank recorded, whole or without embedding and LM head."""
    return rank.layers.recorded_rows or (() if rank.graphs is None else rank.graphs.captured_rows)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, pp=2)], ids=["tp2", "tp2pp2"])
def test_recorded_steps_of_tensor_parallel_ranks(layout: Layout, dtype: ModelDtype, tmp_path: Path) -> None:
    """They equal computed ones, and those of a single rank."""
    model = tiny_llama()
    ranks = begun(write_checkpoint(model, tmp_path / "checkpoint", layout), tmp_path / "engine", dtype)
    alone = begun(write_checkpoint(model, tmp_path / "one", Layout()), tmp_path / "single", dtype)
    for at in range(3, 12):
        made = stepped(ranks, [0, 2, 3, 4], at)
        computed = stepped(ranks, [0, 2, 3, 4], at, beside=True)
        single = stepped(alone, [0, 2, 3, 4], at)
        assert (made - computed).abs().max() <= TOLERANCES[dtype] * computed.abs().max()
        assert (made - single).abs().max() <= TOLERANCES[dtype] * single.abs().max()
    assert [rows_of(rank) for rank in ranks.models] == [(4,)] * layout.tp * layout.pp
    whole = [rank.graphs.captured_rows for rank in ranks.models if rank.graphs is not None]
    assert whole == ([] if layout.pp > 1 else [(4,)] * 2 if dtype == "float32" else [()] * 2)
    ranks.close()
    alone.close()


def test_exchanges_over_the_network_are_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(SharedSums, "of", lambda *_: None)
    engine = write_checkpoint(tiny_llama(), tmp_path / "checkpoint", Layout(tp=2))
    ranks = begun(engine, tmp_path / "engine", "bfloat16")
    first, again = (stepped(ranks, list(range(SEQUENCES)), 3) for _ in range(2))
    assert torch.equal(first, again)
    assert [rows_of(rank) for rank in ranks.models] == [(), ()]
    ranks.close()
