"""Sums over tensor-parallel ranks in memory that their processes share, by the CPU kernels (source/ranks.cpp).

An exchange over the loopback interface takes hundreds of microseconds, and each layer needs two exchanges.
"""

import logging
import mmap
import os
import weakref
from tempfile import TemporaryFile

import torch
from torch import Tensor

from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.native.bindings import TYPES, Native, native_for

_LOG = logging.getLogger(__name__)
_FLAG_BYTES = 64


class SharedSums:
    """Memory shared by an engine's ranks: a flag that a rank has ended, then an area for each pipeline stage.

    `descriptor`: an open file that each rank's process maps. It has no name, so that no file is left behind.
    """

    def __init__(self, kernels: Native, tp: int, pp: int, descriptor: int | None = None) -> None:
        self._kernels, self._tp = kernels, tp
        self._stage_bytes = kernels.shared_bytes(tp)
        size = _FLAG_BYTES + pp * self._stage_bytes
        if descriptor is None:
            descriptor = _nameless_file()
            weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    @classmethod
    def of(cls, place: Placement, tp: int, pp: int, descriptor: int | None = None) -> "SharedSums | None":
        """New memory, or that of an inherited `descriptor`; None without CPU kernels or tensor parallelism.

        Also None if the operating system lacks shared memory; the ranks then exchange messages, which is slower.
        """
        kernels = native_for(place.device, place.dtype)
        if kernels is None or tp == 1:
            return None
        try:
            return cls(kernels, tp, pp, descriptor)
        except OSError as error:
            if descriptor is not None:
                raise
            _LOG.warning("the ranks sum over the loopback interface, slower: no shared memory: %s", error.strerror)
            return None

    @staticmethod
    def takes(values: Tensor) -> bool:
        """Whether `add_up` supports the dtype."""
        return values.dtype in TYPES

    def add_up(self, values: Tensor, stage: int, rank: int) -> None:
        """Replace contiguous `values` by their sum over the ranks of a stage. All must call this equally often.

        Raises RuntimeError if a rank ended; a recorded call then leaves undefined values.
        """
        shared = self._address + _FLAG_BYTES + stage * self._stage_bytes
        self._kernels.sum_ranks(values, self._address, shared, self._tp, rank)
        if self._memory[0]:
            raise RuntimeError("a rank ended")

    def end(self) -> None:
        """Record that a rank has ended, so that the others stop waiting for it."""
        self._memory[0] = 1


def _nameless_file() -> int:
    """An open file in memory without a name. Raises OSError."""
    if hasattr(os, "memfd_create"):  # not in a Python that was built against an old C library
        return os.memfd_create("trtforge-ranks", os.MFD_CLOEXEC)
    with TemporaryFile(dir="/dev/shm") as file:
        return os.dup(file.fileno())
