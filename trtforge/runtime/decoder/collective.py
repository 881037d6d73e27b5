"""Communication between the ranks of one engine; a single rank needs none."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trtforge.runtime.scheduling.integers import Ints


class Collective(Protocol):
    """The communication of one rank with the others."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum over the tensor-parallel ranks of this pipeline stage."""

    def all_gather(self, part: Tensor) -> Tensor:
        """Concatenate the parts of the tensor-parallel ranks along the last dimension."""

    def send_hidden(self, hidden: Tensor) -> None:
        """Start sending the hidden states to the next pipeline stage; sending may continue after this returns."""

    def finish_sending(self) -> None:
        """Wait until all hidden states are sent. Must follow the last `send_hidden` of a step."""

    def receive_hidden(self, into: Tensor) -> Tensor:
        """Receive the hidden states of the previous pipeline stage."""

    def gather_logits(self, part: Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        """Gather the last pipeline stage's parts as (rows, tp x columns) logits on rank 0; None on other ranks."""

    def broadcast_step(self, encoded: Ints | None) -> Ints:
        """Broadcast rank 0's step to every rank."""

    def smallest(self, value: int) -> int:
        """The minimum of `value` over all ranks."""

    def of_all(self, value: int) -> list[int]:
        """The `value` of every rank."""

    def gather_bytes(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
        """On rank 0, the uint8 tensors (bytes,) of all ranks, in host memory; None on other ranks. `sizes`: their
        bytes."""

    def leave(self) -> None:
        """Disconnect: ranks that wait for this one get an error."""


class Alone:
    """A single rank."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def send_hidden(self, hidden: Tensor) -> None:
        raise AssertionError("there is no other pipeline stage")

    def finish_sending(self) -> None:
        pass

    def receive_hidden(self, into: Tensor) -> Tensor:
        raise AssertionError("there is no other pipeline stage")

    def gather_logits(self, part: Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        return part

    def broadcast_step(self, encoded: Ints | None) -> Ints:
        assert encoded is not None
        return encoded

    def smallest(self, value: int) -> int:
        return value

    def of_all(self, value: int) -> list[int]:
        return [value]

    def gather_bytes(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
        return [own]

    def leave(self) -> None:
        pass
