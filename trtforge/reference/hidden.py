"""The hidden states between two decoder layers: in memory up to a budget, the rest in a file."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


class HiddenStates:
    """One tensor per batch: (windows, length, hidden) of one dtype. `put` overwrites the tensor that `get` returned.

    With `directory`, batches beyond `budget` bytes are kept in one file there, read and written without mapping it.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        budget: int | None = None,
        directory: Path | None = None,
    ) -> None:
        self._shapes = [(*shape, hidden_size) for shape in shapes]
        self._dtype, self._device = dtype, device
        self._held: dict[int, Tensor] = {}
        sizes = [windows * length * hidden_size * dtype.itemsize for windows, length in shapes]
        self._offsets: dict[int, int] = {}
        held = spilled = 0
        for batch, size in enumerate(sizes):
            if budget is None or held + size <= budget:
                held += size
            else:
                self._offsets[batch] = spilled
                spilled += size
        self._file: int | None = None
        if spilled:
            assert directory is not None, "a budget needs a directory"
            path = directory / ".hidden-states"
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            path.unlink()  # the open file stays usable, and a kill leaves nothing behind

    def __len__(self) -> int:
        return len(self._shapes)

    def get(self, batch: int) -> Tensor:
        """The states of a batch, on the computing device."""
        if batch not in self._offsets:
            return self._held[batch]
        assert self._file is not None
        return self._read(self._file, batch, self._offsets[batch])

    def put(self, batch: int, states: Tensor) -> None:
        """Keep the states of a batch. Raises OSError where the disk is full."""
        if batch not in self._offsets:
            held = self._held.setdefault(batch, states)
            if held is not states:
                held.copy_(states)  # in place, as new tensors would fragment the heap
            return
        assert self._file is not None
        _write(self._file, states, self._offsets[batch])

    def save(self, path: Path) -> None:
        """Write the states of all batches to a file, in order. Raises OSError where the disk is full."""
        with path.open("wb", buffering=0) as file:
            offset = 0
            for batch in range(len(self)):
                offset += _write(file.fileno(), self.get(batch), offset)

    def restore(self, path: Path) -> None:
        """Load the states of all batches from a file that `save` wrote."""
        with path.open("rb", buffering=0) as file:
            offset = 0
            for batch in range(len(self)):
                states = self._read(file.fileno(), batch, offset)
                offset += states.nbytes
                self.put(batch, states)

    def _read(self, file: int, batch: int, offset: int) -> Tensor:
        windows, length, hidden = self._shapes[batch]
        data = bytearray(windows * length * hidden * self._dtype.itemsize)
        view, done = memoryview(data), 0
        while done < len(data):
            count = os.preadv(file, [view[done:]], offset + done)
            assert count > 0, "the file is shorter than what was written"
            done += count
        return torch.frombuffer(data, dtype=self._dtype).view(self._shapes[batch]).to(self._device)

    def close(self) -> None:
        """Release the file and the states."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._held.clear()


def _write(file: int, states: Tensor, offset: int) -> int:
    """Write a tensor's bytes at `offset`; returns their number."""
    view, done = states.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)
    return done
