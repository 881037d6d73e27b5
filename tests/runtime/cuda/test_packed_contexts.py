"""Several whole prompts are computed by one call on a GPU; here a stand-in for its kernel computes them on the CPU."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from trtforge.runtime.architecture.positions import ALL, Reach
from trtforge.runtime.decoder.attention import Attention
from trtforge.runtime.decoder.batch import Batch, Packed
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch
from trtforge.runtime.decoder.scores import FusedScores
from trtforge.runtime.scheduling.batch import Step

BLOCK, COLUMNS, SIZE = 4, 4, 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PackedScores(FusedScores):
    """Takes everything, and computes sequence by sequence."""

    def takes_packed(self, queries: Tensor) -> bool:
        return True

    def packed(self, queries: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, longest: int) -> Tensor:
        counts = offsets.diff()
        assert offsets.dtype is torch.int32
        assert int(counts.max()) == longest
        found = []
        for parts in zip(*(each.split(counts.tolist()) for each in (queries, keys, values)), strict=True):
            q, k, v = (part.transpose(0, 1) for part in parts)
            found.append(self.sequence(q, k, v, None).transpose(0, 1))
        return torch.cat(found)


def step_of(starts: list[int], counts: list[int]) -> Step:
    rows = len(counts)
    tables = 1 + np.arange(rows * COLUMNS).reshape(rows, COLUMNS)
    ones = np.ones(rows, dtype=np.int64)
    return Step(np.array(starts), np.array(counts), ones, tables, np.zeros(sum(counts), dtype=np.int64))


def attended(step: Step, scores: FusedScores, reach: Reach = ALL, *, packed: bool) -> Tensor:
    """Of two query heads for each of two KV heads; a cache that holds what random tokens left."""
    generator = torch.Generator().manual_seed(0)
    storage = torch.randn(1 + len(step.counts) * COLUMNS, BLOCK, 4, SIZE, generator=generator)
    heads = torch.randn(len(step.tokens), 8, SIZE, generator=generator)
    batch = Batch.of(step, BLOCK, CPU, torch.float32, reaches=(reach,))
    if packed:
        batch = replace(batch, packed=Packed.of(step, step.generation_rows, CPU))
    cache = LayerCache(storage, None, torch.float32, Scratch())
    return Attention(4, 2, SIZE, scores, reach)(heads, batch, cache)


@pytest.mark.parametrize(
    ("starts", "counts", "reach"),
    [
        ([0, 0, 0], [5, 2, 9], ALL),
        ([3, 7, 0, 0], [1, 1, 4, 6], ALL),  # single tokens before them
        ([0, 0], [6, 9], Reach(window=4)),  # too long for a window: computed one by one
        ([0, 4], [6, 5], ALL),  # a later chunk too: one by one
        ([0], [7], ALL),
    ],
)
def test_together_as_one_by_one(starts: list[int], counts: list[int], reach: Reach) -> None:
    step = step_of(starts, counts)
    expected = attended(step, FusedScores(0.3), reach, packed=False)
    assert torch.allclose(attended(step, PackedScores(0.3), reach, packed=True), expected, atol=1e-6)


def test_only_several_whole_sequences_are_packed() -> None:
    packed = Packed.of(step_of([3, 7, 0, 0], [1, 1, 4, 6]), 2, CPU)
    assert packed is not None
    assert (packed.first, packed.end, packed.longest) == (2, 12, 6)
    assert packed.offsets.tolist() == [0, 4, 10]
    assert Packed.of(step_of([0, 4], [6, 5]), 0, CPU) is None
    assert Packed.of(step_of([0], [7]), 0, CPU) is None
