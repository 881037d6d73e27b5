"""Records the kernel calls of a computation, to replay them with a single call, like a CUDA graph on a GPU.

A replayed call reads and writes the same addresses as when it was recorded: results are in an `Arena`, and new inputs
must be copied to the memory of the recorded inputs.
"""

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trtforge.runtime.native.structures import ARGUMENTS, RECORDED, ROWS, Call, Calls, RowCount, RowCounts, as_integer

_ALIGNMENT = 64
_ALLOCATIONS = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))
_ACTIVE = threading.local()


class NotRecordedError(Exception):
    """The computation needs more than kernel calls. Other operations cannot run, as a recording computes no inputs."""


class Arena:
    """Memory for the results of recorded layers, in two halves that alternate: a layer overwrites the last but one."""

    def __init__(self) -> None:
        self._halves = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._half = self._used = 0

    def turn(self) -> None:
        """Switch to the other half, for the results of another layer."""
        self._half = 1 - self._half
        self.restart()

    def restart(self) -> None:
        """Overwrite the results since the last `turn` with the next ones."""
        self._used = 0

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor with this one's shape, strides and dtype. It keeps its memory even if the arena is reallocated."""
        start, size = self._used, tensor.untyped_storage().nbytes()
        self._used = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._used > len(self._halves[self._half]):
            self._halves[self._half] = torch.empty(2 * self._used + _ALIGNMENT, dtype=torch.uint8)
        memory = self._halves[self._half]
        first = -memory.data_ptr() % _ALIGNMENT
        bytes_ = memory[first + start : first + start + size]
        return bytes_.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class Recorder(TorchDispatchMode):
    """Collects kernel calls without running them. Raises NotRecordedError if torch would compute something."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._calls: list[Call] = []
        self._kept: list[object] = []
        self._rows: list[tuple[int, int] | int] = []
        self._first_wanted: int | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled by torch, and True would import torch's compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _ALLOCATIONS:
            found = self._arena.like(found)
            self._kept.append(found)
        elif not _computes_nothing(func, args, found):
            raise NotRecordedError
        return found

    @contextmanager
    def into(self, arena: Arena) -> Iterator[None]:
        """Within this context, allocate results in another arena."""
        own, self._arena = self._arena, arena
        try:
            yield
        finally:
            self._arena = own

    def add(self, name: str, arguments: Sequence[Any]) -> None:
        """Add a kernel call. Keeps structures among the arguments alive, but not the memory that they point to."""
        if name not in RECORDED:
            raise NotRecordedError
        values = [as_integer(kind, each) for kind, each in zip(ARGUMENTS[name], arguments, strict=True)]
        self._calls.append(Call(RECORDED.index(name), (ctypes.c_int64 * 10)(*values)))
        self._kept.extend(arguments)
        place = ROWS[name]
        self._rows.append(place if isinstance(place, int) else _field(arguments[place[0]], place[1]))

    def narrow(self) -> None:
        """From now on, calls compute only the rows that give logits."""
        self._first_wanted = len(self._calls)

    def calls(self) -> tuple[Calls, list[object]]:
        """The calls for `Native.replay`, and the objects that must live as long as they do."""
        return (Call * len(self._calls))(*self._calls), self._kept

    def row_counts(self, calls: Calls, rows: int, wanted: int) -> RowCounts:
        """Where the arguments of `calls` contain their number of rows, for `Native.set_rows`.

        `rows`, `wanted`: the numbers of rows in the recording. Raises NotRecordedError if a call has no multiple of it.
        """
        first_wanted = len(calls) if self._first_wanted is None else self._first_wanted
        arguments = ctypes.addressof(calls) + Call.arguments.offset
        found = []
        for index, place in enumerate(self._rows):
            of_wanted = index >= first_wanted
            if isinstance(place, int):
                address = arguments + index * ctypes.sizeof(Call) + place * ctypes.sizeof(ctypes.c_int64)
                value = calls[index].arguments[place]
            else:
                address, value = place
            each, rest = divmod(value, wanted if of_wanted else rows)
            if rest:
                raise NotRecordedError(f"{RECORDED[calls[index].kernel]} counts {value} of {rows} rows")
            found.append(RowCount(address, each, of_wanted))
        return (RowCount * len(found))(*found)


def _field(structure: ctypes.Structure, name: str) -> tuple[int, int]:
    """The address of an integer in a structure, and its value."""
    offset: int = getattr(type(structure), name).offset
    return ctypes.addressof(structure) + offset, getattr(structure, name)


def _computes_nothing(func: Any, args: Sequence[Any], found: object) -> bool:
    """Whether an operation only returns views of its first argument, or writes to no element."""
    first = args[0] if args else None
    if not isinstance(first, Tensor):
        return False
    if func._schema.is_mutable:
        return first.numel() == 0
    results = found if isinstance(found, list | tuple) else (found,)
    return all(_share(first, result) for result in results)


def _share(a: Tensor, b: object) -> bool:
    return isinstance(b, Tensor) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@contextmanager
def recording(arena: Arena) -> Iterator[Recorder]:
    """Record the kernel calls of this thread.

    The results are left uninitialised. Operations other than kernel calls raise NotRecordedError.
    """
    recorder = Recorder(arena)
    _ACTIVE.recorder = recorder
    try:
        with recorder:
            yield recorder
    finally:
        _ACTIVE.recorder = None


def current_recorder() -> Recorder | None:
    """The recorder of this thread, if a recording is active."""
    recorder: Recorder | None = getattr(_ACTIVE, "recorder", None)
    return recorder


def narrow_recording() -> None:
    """From now on, recorded calls compute only the rows that give logits."""
    recorder = current_recorder()
    if recorder is not None:
        recorder.narrow()


def interrupt_recording() -> None:
    """Raise NotRecordedError in a recording, before code that is neither a kernel call nor a torch operation."""
    if current_recorder() is not None:
        raise NotRecordedError
