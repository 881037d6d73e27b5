"""What KV blocks hold on all ranks, as bytes: those of each rank's layers one after another, in the order of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.scheduling.batch import Step


@dataclass(frozen=True)
class BlockContents:
    """`sizes`: bytes of a block on each rank."""

    sizes: Sequence[int]

    @property
    def bytes(self) -> int:
        """Of a block on all ranks."""
        return sum(self.sizes)

    def part(self, content: Tensor, index: int) -> Tensor:
        """What rank `index` has of a block: uint8 (bytes of the rank,) of uint8 (all bytes, and perhaps padding)."""
        start = sum(self.sizes[:index])
        return content[start : start + self.sizes[index]]

    def with_fills(self, step: Step, fills: Mapping[int, Tensor]) -> Step:
        """The step that brings the contents of these blocks to other ranks: uint8 (bytes,) by block."""
        if not fills:
            return step
        words = np.zeros((len(fills), -(-self.bytes // np.dtype(np.int64).itemsize)), dtype=np.int64)
        for row, content in zip(words.view(np.uint8), fills.values(), strict=True):
            row[: self.bytes] = content.numpy()
        return replace(step, filled=np.array(list(fills), dtype=np.int64), contents=words)

    def fills(self, step: Step, index: int) -> Mapping[int, Tensor]:
        """What a step brings to rank `index`, by block."""
        found = torch.from_numpy(np.ascontiguousarray(step.contents).view(np.uint8))
        return {int(block): self.part(row, index).clone() for block, row in zip(step.filled, found, strict=True)}
