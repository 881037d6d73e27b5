"""The contents of KV blocks on all ranks, as bytes: each rank's layers one after another, in the order of ranks."""

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
        """Bytes of a block on all ranks."""
        return sum(self.sizes)

    def part(self, content: Tensor, index: int) -> Tensor:
        """Rank `index`'s part, uint8 (bytes of the rank,), of a block's content, uint8 (all bytes, maybe padding)."""
        start = sum(self.sizes[:index])
        return content[start : start + self.sizes[index]]

    def with_fills(self, step: Step, fills: Mapping[int, Tensor]) -> Step:
        """The step with the contents of these blocks, uint8 (bytes,) by block, to send to other ranks."""
        if not fills:
            return step
        words = np.zeros((len(fills), -(-self.bytes // np.dtype(np.int64).itemsize)), dtype=np.int64)
        for row, content in zip(words.view(np.uint8), fills.values(), strict=True):
            row[: self.bytes] = content.numpy()
        return replace(step, filled=np.array(list(fills), dtype=np.int64), contents=words)

    def fills(self, step: Step, index: int) -> Mapping[int, Tensor]:
        """The contents in a step for rank `index`, by block."""
        found = torch.from_numpy(np.ascontiguousarray(step.contents).view(np.uint8))
        return {int(block): self.part(row, index).clone() for block, row in zip(step.filled, found, strict=True)}
