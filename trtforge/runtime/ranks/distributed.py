"""Communication between the ranks on one machine: gloo over the loopback interface, and NCCL between GPUs.

Process groups are kept here, not in torch.distributed's globals, so that a process can have several engines.
"""

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, ReduceOp, Store, TCPStore

from trtforge.core.defaults import LOOPBACK
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.native.recorder import interrupt_recording
from trtforge.runtime.ranks.shared_sums import SharedSums
from trtforge.runtime.scheduling.integers import Ints

_STEP_BUFFER = 8192  # integers in one broadcast; longer steps need a second one
_FOREVER = timedelta(days=3650)  # workers wait for the next step as long as their parent lives


def serve_store() -> tuple[TCPStore, int]:
    """The rendezvous store of a new group, listening on the loopback interface only, and its port."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join_store(port: int) -> TCPStore:
    """Connect to the rendezvous store that rank 0 serves."""
    return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)


def loaded_key(index: int) -> str:
    """The store key that worker `index` sets when its weights are loaded."""
    return f"loaded/{index}"


class _Work(Protocol):
    def wait(self) -> object: ...


class _Group(Protocol):
    """The common interface of gloo's and NCCL's process groups."""

    def allreduce(self, tensors: list[Tensor], options: object = ...) -> _Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Work: ...

    def broadcast(self, tensors: list[Tensor]) -> _Work: ...

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...


class Distributed:
    """The collectives of one rank; every rank must call `connect` before any other method."""

    def __init__(self, spec: DecoderSpec, index: int, device: torch.device, sums: SharedSums | None = None) -> None:
        """`sums`: used if every rank has them."""
        self._index = index
        self._tp, self._world = spec.tp, spec.tp * spec.pp
        self._stage, self._last_stage = spec.rank.pp_rank, spec.pp - 1
        self._tp_rank = spec.rank.tp_rank
        self._device = device
        self._buffer = torch.zeros(_STEP_BUFFER, dtype=torch.int64)
        self._sending: deque[tuple[_Work, Tensor]] = deque()
        self._sums = sums
        self._control: _Group
        self._all: _Group
        self._peers: _Group

    def connect(self, store: TCPStore) -> None:
        """Connect to the other ranks."""
        self._control = _gloo(PrefixStore("control", store), self._index, self._world)
        if self._device.type == "cuda":
            self._all = _nccl(PrefixStore("all", store), self._index, self._world)
            self._peers = _nccl(PrefixStore(f"stage{self._stage}", store), self._tp_rank, self._tp)
        else:
            self._all = self._control
            self._peers = _gloo(PrefixStore(f"stage{self._stage}", store), self._tp_rank, self._tp)
        if not self.smallest(int(self._sums is not None)):
            self._sums = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self._tp == 1:
            return partial
        partial = partial.contiguous()
        if self._sums is not None and self._sums.takes(partial):
            self._sums.add_up(partial, self._stage, self._tp_rank)
        else:
            interrupt_recording()
            self._peers.allreduce([partial]).wait()
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        if self._tp == 1:
            return part
        interrupt_recording()
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._tp)]
        self._peers.allgather([parts], [part]).wait()
        return torch.cat(parts, dim=-1)

    def send_hidden(self, hidden: Tensor) -> None:
        sent = hidden.clone(memory_format=torch.contiguous_format)  # the next micro-batch may overwrite `hidden`
        self._sending.append((self._all.send([sent], self._index + self._tp, 0), sent))

    def finish_sending(self) -> None:
        while self._sending:
            work, _ = self._sending.popleft()
            work.wait()

    def receive_hidden(self, into: Tensor) -> Tensor:
        self._all.recv([into], self._index - self._tp, 0).wait()
        return into

    def gather_logits(self, part: Tensor | None, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        if self._index != 0:
            if part is not None:
                self._all.send([part.contiguous()], 0, 1).wait()
            return None
        parts = []
        for rank in range(self._last_stage * self._tp, self._world):
            if rank == 0:
                assert part is not None, "rank 0 is in the last pipeline stage but has no logits"
                parts.append(part)
            else:
                received = torch.empty(rows, columns, dtype=dtype, device=self._device)
                self._all.recv([received], rank, 1).wait()
                parts.append(received)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def broadcast_step(self, encoded: Ints | None) -> Ints:
        buffer = self._buffer
        if encoded is not None:
            head = min(len(encoded), _STEP_BUFFER)
            buffer[:head] = torch.from_numpy(encoded[:head])
        self._control.broadcast([buffer]).wait()
        length = int(buffer[0])
        if length <= _STEP_BUFFER:
            return encoded if encoded is not None else buffer.numpy().copy()
        rest = (
            torch.from_numpy(encoded[_STEP_BUFFER:]) if encoded is not None else buffer.new_empty(length - len(buffer))
        )
        self._control.broadcast([rest]).wait()
        return encoded if encoded is not None else torch.cat((buffer, rest)).numpy()

    def smallest(self, value: int) -> int:
        values = torch.tensor([value])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = ReduceOp.MIN
        self._control.allreduce([values], options).wait()
        return int(values)

    def of_all(self, value: int) -> list[int]:
        values = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world)]
        self._control.allgather([values], [torch.tensor([value])]).wait()
        return [int(each) for each in values]

    def gather_bytes(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
        if self._index != 0:
            self._control.send([own], 0, 2).wait()
            return None
        parts = [own, *(torch.empty(size, dtype=torch.uint8) for size in sizes[1:])]
        for rank, part in enumerate(parts[1:], 1):
            self._control.recv([part], rank, 2).wait()
        return parts

    def leave(self) -> None:
        if self._sums is not None:
            self._sums.end()
        del self._control, self._all, self._peers  # closes gloo's connections, so that waiting peers get an error


def _gloo(store: Store, rank: int, size: int) -> _Group:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = _FOREVER
    group: _Group = gloo(store, rank, size, options)
    return group


def _nccl(store: Store, rank: int, size: int) -> _Group:
    nccl: Any = dist.ProcessGroupNCCL
    group: _Group = nccl(store, rank, size, nccl.Options())
    return group
