from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.ranks.distributed import Distributed, join_store, serve_store

Result = TypeVar("Result")


def on_all_ranks(checkpoint: Path, tp: int, pp: int, act: Callable[[Distributed, int], Result]) -> list[Result]:
    """What `act` gives on every rank, each being a thread with a connection of its own."""
    mapping = {"mapping": {"tp_size": tp, "pp_size": pp}}
    config = read_checkpoint_config(checkpoint).model_copy(update=mapping)
    store, port = serve_store()

    def run(index: int) -> Result:
        ranks = Distributed(DecoderSpec.of(config, index), index, torch.device("cpu"))
        ranks.connect(store if index == 0 else join_store(port))
        return act(ranks, index)

    with ThreadPoolExecutor(tp * pp) as pool:
        return list(pool.map(run, range(tp * pp)))


@pytest.mark.parametrize("length", [5, 8192, 30000])
def test_every_rank_gets_the_whole_step(checkpoint: Path, length: int) -> None:
    step = np.arange(length)
    step[0] = length
    received = on_all_ranks(checkpoint, 2, 2, lambda ranks, index: ranks.broadcast_step(step if index == 0 else None))
    for values in received:
        assert np.array_equal(values[:length], step)


def test_sums_and_parts_stay_within_a_pipeline_stage(checkpoint: Path) -> None:
    def act(ranks: Distributed, index: int) -> tuple[list[float], list[float]]:
        mine = torch.full((1, 2), float(index))
        return ranks.all_reduce(mine.clone())[0].tolist(), ranks.all_gather(mine)[0].tolist()

    assert on_all_ranks(checkpoint, 2, 2, act) == [
        ([1.0, 1.0], [0.0, 0.0, 1.0, 1.0]),
        ([1.0, 1.0], [0.0, 0.0, 1.0, 1.0]),
        ([5.0, 5.0], [2.0, 2.0, 3.0, 3.0]),
        ([5.0, 5.0], [2.0, 2.0, 3.0, 3.0]),
    ]


def test_hidden_states_go_to_the_next_stage_and_logits_to_rank_0(checkpoint: Path) -> None:
    def act(ranks: Distributed, index: int) -> list[float] | None:
        if index < 2:
            ranks.send_hidden(torch.full((1, 2), index + 1.0))
            ranks.finish_sending()
            part = None
        else:
            part = ranks.receive_hidden(torch.empty(1, 2)) * 10
        logits = ranks.gather_logits(part, 1, 2, torch.float32)
        return None if logits is None else logits[0].tolist()

    assert on_all_ranks(checkpoint, 2, 2, act) == [[10.0, 10.0, 20.0, 20.0], None, None, None]


def test_the_smallest_cache_decides(checkpoint: Path) -> None:
    assert on_all_ranks(checkpoint, 2, 1, lambda ranks, index: ranks.smallest(100 - index)) == [99, 99]
