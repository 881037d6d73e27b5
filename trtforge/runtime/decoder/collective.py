"""What the ranks of one engine exchange. The single rank exchanges nothing."""

from typing import Protocol

from torch import Tensor

from trtforge.runtime.scheduling.batch import Ints


class Collective(Protocol):
    """The exchanges of a step, as one rank sees them."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum over the tensor-parallel ranks of this pipeline stage."""

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of the tensor-parallel ranks side by side along the last dimension."""

    def send_hidden(self, hidden: Tensor) -> None:
        """Give the hidden states to the next pipeline stage."""

    def receive_hidden(self, into: Tensor) -> Tensor:
        """The hidden states of the pipeline stage before."""

    def gather_logits(self, part: Tensor | None, rows: int, columns: int, like: Tensor) -> Tensor | None:
        """On rank 0 the (rows, tp x columns) logits, whose parts the last pipeline stage holds; None elsewhere."""

    def broadcast_step(self, encoded: Ints | None) -> Ints:
        """Rank 0's step on every rank."""

    def smallest(self, value: int) -> int:
        """The smallest value of all ranks."""

    def leave(self) -> None:
        """Exchange no more: ranks that wait for this one get an error."""


class Alone:
    """One rank."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def send_hidden(self, hidden: Tensor) -> None:
        raise AssertionError("there is no other pipeline stage")

    def receive_hidden(self, into: Tensor) -> Tensor:
        raise AssertionError("there is no other pipeline stage")

    def gather_logits(self, part: Tensor | None, rows: int, columns: int, like: Tensor) -> Tensor | None:
        return part

    def broadcast_step(self, encoded: Ints | None) -> Ints:
        assert encoded is not None
        return encoded

    def smallest(self, value: int) -> int:
        return value

    def leave(self) -> None:
        pass
