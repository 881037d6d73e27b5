"""The adapters of one rank: a cache, bounded in bytes, and their contribution to each linear layer's output.

Adapters in use occupy slots of one tensor per linear layer. On the CPU a kernel multiplies every single-token row by
its own adapter. Without the kernel, one product with A and one with B for each part compute all adapters together, and
each row keeps its own adapter's result. Contexts use such products too, once for neighbours with the same adapter.
Every rank sees the same steps, so all caches contain the same adapters.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.features import LoraFeature
from trtforge.formats.adapter import ADAPTERS_DIRECTORY
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.adapters.files import AdapterFile
from trtforge.runtime.adapters.parts import Part, adapted_parts
from trtforge.runtime.architecture.layout import layer_name
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.cuda.pinned import sent
from trtforge.runtime.cuda.triton_support import power_from
from trtforge.runtime.linears.linear import Linear, Placement
from trtforge.runtime.native.adapters import Matrices, add_adapters
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.scheduling.batch import Step


@dataclass(eq=False)
class _Slots:
    """The slots of a linear layer's adapters, whose modules are its `parts`.

    `columns`: int64 (parts, 2), the first output column that each part changes, and how many.
    """

    parts: tuple[Part, ...]
    matrices: Matrices
    columns: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.columns = torch.tensor([(part.first, part.out) for part in self.parts])

    def put(self, slot: int, matrices: Matrices) -> None:
        """Copy an adapter's matrices into its slot."""
        for own, new in zip(self.matrices, matrices, strict=True):
            own[slot] = new

    def get(self, slot: int) -> Matrices:
        """A copy of a slot's matrices, without the slot dimension."""
        return Matrices(*(own[slot].clone() for own in self.matrices))

    def grow(self, slots: int) -> None:
        """Add empty slots up to this number."""
        self.matrices = Matrices(*(_grown(own, slots) for own in self.matrices))

    def outputs(self) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its B (slots, rank, outputs)."""
        return zip(self.parts, self.matrices.b.split([part.out for part in self.parts], dim=-1), strict=True)

    def add(self, x: Tensor, y: Tensor, used: slice, others: Tensor | None = None) -> None:
        """y += (x A^T) B for each part by torch, for the slots `used`: x (rows, inputs), y (rows, outputs).

        `others` (rows, slots, 1, 1): True for slots other than the row's own.
        """
        a = self.matrices.a[used]
        inner = (x @ a.flatten(0, 2).t()).view(len(x), *a.shape[:3])
        if others is not None:
            inner.masked_fill_(others, 0.0)
        for index, (part, b) in enumerate(self.outputs()):
            own = inner[:, :, index].reshape(len(x), -1) @ b[used].flatten(0, 1)
            y.narrow(1, part.first, part.out).add_(own)


@dataclass(frozen=True)
class _Use:
    """Which adapters a step's tokens use.

    `slots`: of the single-token rows, int64 (rows or more,), -1 for none. `contexts`: (first token, end, slot),
    neighbours with the same adapter together. `others` (rows, slots, 1, 1), without the kernel: True for slots in
    [first, end) other than the row's own.
    """

    slots: Tensor
    first: int = 0
    end: int = 0
    others: Tensor | None = None
    contexts: Sequence[tuple[int, int, int]] = ()


@dataclass(eq=False)
class _Files:
    """Reads an engine's adapters and those `sent` with requests, zero-padded to the largest rank."""

    directory: Path
    lora: LoraFeature
    config: CheckpointConfig
    spec: DecoderSpec
    place: Placement
    sent: Path | None
    parts: dict[str, tuple[Part, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = dict(adapted_parts(self.spec, self.config, self.lora.modules))

    @property
    def rank(self) -> int:
        assert self.lora.max_rank is not None, "an engine's features are resolved"
        return self.lora.max_rank

    def load(self, task: int) -> dict[str, Matrices]:
        """All matrices of an adapter by linear layer. Raises ForgeError."""
        shapes = {part.module: part.shape for parts in self.parts.values() for part in parts}
        layers = self.config.num_hidden_layers
        own = task <= len(self.lora.adapters)
        assert own or self.sent is not None, "an adapter that nobody sent"
        place = self.directory / ADAPTERS_DIRECTORY if own or self.sent is None else self.sent
        file = AdapterFile(place / str(task), shapes, layers, self.rank, scaled=not own)
        of_rank = self.config.parallel.layers_of(self.spec.rank.pp_rank, layers)
        return {
            f"{layer_name(index)}.{name}": self._padded(file, layer, parts)
            for index, layer in enumerate(of_rank)
            for name, parts in self.parts.items()
        }

    def empty(self, parts: tuple[Part, ...]) -> _Slots:
        """Slots without adapters."""
        a = torch.zeros(0, len(parts), self.rank, parts[0].inputs, dtype=self.place.dtype, device=self.place.device)
        b = a.new_zeros(0, self.rank, sum(part.out for part in parts))
        return _Slots(parts, Matrices(a, b, torch.zeros(0, len(parts), dtype=torch.int64)))

    def _padded(self, file: AdapterFile, layer: int, parts: tuple[Part, ...]) -> Matrices:
        slots = self.empty(parts)
        slots.grow(1)
        for index, (part, b) in enumerate(slots.outputs()):
            found = file.read(layer, part, self.place.dtype)
            if found is not None:
                rank = len(found[0])
                slots.matrices.a[0, index, :rank], b[0, :rank] = found
                slots.matrices.ranks[0, index] = rank
        return slots.get(0)


class RankAdapters:
    """Adapters of a rank, by task id."""

    def __init__(
        self,
        directory: Path,
        lora: LoraFeature,
        config: CheckpointConfig,
        spec: DecoderSpec,
        place: Placement,
        sent: Path | None = None,
    ) -> None:
        """`directory`: the engine's; `sent`: directory of adapters that come with requests, named by `sent.name_of`.

        Raises ForgeError if the model lacks the adapted layers, or the cache is too small.
        """
        self._files = _Files(directory, lora, config, spec, place, sent)
        self._most = most_adapters(lora, config, spec, place)
        self._slots: dict[str, _Slots] = {
            f"{layer_name(index)}.{name}": self._files.empty(parts)
            for index in range(spec.num_layers)
            for name, parts in self._files.parts.items()
        }
        self._tasks: list[int] = []
        self._cached: dict[int, dict[str, Matrices]] = {}
        self._last: dict[int, int] = {}
        self._steps = 0
        self._use: _Use | None = None
        self._kernels = native_for(place.device, place.dtype)
        self._row_slots = torch.full((1,), -1)
        self.loads = 0
        self.moves = 0
        """How often memory read by a step's kernels was reallocated; recordings made before are invalid."""

    @property
    def reserved_bytes(self) -> int:
        """Maximum bytes for the adapters."""
        files = self._files
        size = adapter_bytes(files.lora, files.spec, files.parts, files.place)
        own = len(files.lora.adapters) * size
        return files.lora.host_memory if files.sent is not None else min(files.lora.host_memory, own)

    @property
    def held(self) -> tuple[int, ...]:
        """Task ids of the adapters in memory."""
        return (*(task for task in self._tasks if task), *self._cached)

    @property
    def used(self) -> bool:
        """Whether a token of the step has an adapter."""
        return self._use is not None

    def begin(self, step: Step) -> None:
        """Load the missing adapters of a step and map its tokens to slots."""
        tasks = set(step.adapters.tolist()) - {0}
        if not tasks:
            self._use = None
            return
        self._steps += 1
        self._last |= dict.fromkeys(tasks, self._steps)
        for task in sorted(tasks - set(self._tasks)):
            self._place(task, tasks)
        known = {*self.held, *tasks}
        if len(self._last) > 2 * len(known):
            self._last = {task: self._last[task] for task in known}
        slots = [self._tasks.index(task) if task else -1 for task in step.adapters.tolist()]
        rows = step.generation_rows
        used = [slot for slot in slots[:rows] if slot >= 0]
        first, end, others = min(used, default=0), max(used, default=-1) + 1, None
        if power_from(rows) > len(self._row_slots):
            self._row_slots = torch.full((2 * power_from(rows),), -1)
            self.moves += 1
        self._row_slots[:rows], self._row_slots[rows:] = torch.tensor(slots[:rows]), -1
        if used and self._kernels is None:
            own = sent(np.array(slots[:rows], dtype=np.int64), self._files.place.device).view(-1, 1)
            others = (own != torch.arange(first, end, device=own.device)).view(rows, -1, 1, 1)
        contexts = adapted_contexts(step.counts.cumsum().tolist(), slots, rows)
        self._use = _Use(
            self._row_slots if rows == len(slots) else self._row_slots[:rows], first, end, others, contexts
        )

    def adapted(self, name: str, linear: Linear) -> Linear:
        """The linear layer, with the step's adapters added."""
        slots = self._slots.get(name)
        if slots is None:
            return linear
        return lambda x: self._added(slots, x, linear(x))

    def _added(self, slots: _Slots, x: Tensor, y: Tensor) -> Tensor:
        use = self._use
        if use is None:
            return y
        if self._kernels is not None:
            add_adapters(self._kernels, x, slots.matrices, slots.columns, use.slots[: len(x)], y)
        elif use.others is not None:
            rows = len(use.others)
            slots.add(x[:rows], y[:rows], slice(use.first, use.end), use.others)
        for first, end, slot in use.contexts:
            slots.add(x[first:end], y[first:end], slice(slot, slot + 1))
        return y

    def _place(self, task: int, needed: Collection[int]) -> None:
        """Give an adapter a slot whose adapter the step does not need; that adapter stays in the cache.

        Take the first possible slot, to keep the slots in use together; if the slots are full, the least recently used
        one.
        """
        full = len(self._tasks) >= self._most
        free = [slot for slot, held in enumerate(self._tasks) if held not in needed]
        slot = min(
            free, key=lambda slot: (self._last.get(self._tasks[slot], 0) if full else 0, slot), default=len(self._tasks)
        )
        matrices = self._cached.pop(task, None)
        if matrices is None:
            self.loads += 1
            matrices = self._files.load(task)
        if slot == len(self._tasks):
            size = min(max(1, 2 * slot), max(self._most, slot + 1))
            self._tasks += [0] * (size - slot)
            self._bound()
            self.moves += 1
            for slots in self._slots.values():
                slots.grow(size)
        elif self._tasks[slot]:
            self._cached[self._tasks[slot]] = {name: slots.get(slot) for name, slots in self._slots.items()}
        for name, slots in self._slots.items():
            slots.put(slot, matrices[name])
        self._tasks[slot] = task
        self._bound()

    def _bound(self) -> None:
        """Drop the least recently used cached adapters until slots and cache together fit the bound."""
        while self._cached and len(self._tasks) + len(self._cached) > self._most:
            del self._cached[min(self._cached, key=lambda task: self._last[task])]


def adapter_bytes(lora: LoraFeature, spec: DecoderSpec, parts: Mapping[str, tuple[Part, ...]], place: Placement) -> int:
    """Bytes of an adapter with the largest LoRA rank on one tensor-parallel rank."""
    assert lora.max_rank is not None, "an engine's features are resolved"
    values = sum(part.inputs + part.out for each in parts.values() for part in each)
    return spec.num_layers * lora.max_rank * values * place.dtype.itemsize


def most_adapters(lora: LoraFeature, config: CheckpointConfig, spec: DecoderSpec, place: Placement) -> int:
    """Maximum number of adapters with the largest LoRA rank in a rank's memory. Raises ForgeError if none fits."""
    size = adapter_bytes(lora, spec, adapted_parts(spec, config, lora.modules), place)
    if lora.host_memory < size:
        raise ForgeError(
            f"an adapter of rank {lora.max_rank} has {size} bytes, more than engine.features.lora.host_memory "
            f"{lora.host_memory}",
            hint=f"Compile with --feature lora.host_memory={size} or more.",
        )
    return lora.host_memory // size


def adapted_contexts(ends: Sequence[int], slots: Sequence[int], rows: int) -> list[tuple[int, int, int]]:
    """(first token, end, slot) of the contexts with adapters; neighbours with the same adapter are merged.

    `ends`: end of each sequence's tokens; `rows`: number of single-token rows, which come first.
    """
    found: list[tuple[int, int, int]] = []
    for index in range(rows, len(slots)):
        first = ends[index - 1] if index else 0
        if found and found[-1][1:] == (first, slots[index]):
            found[-1] = (found[-1][0], ends[index], slots[index])
        elif slots[index] >= 0:
            found.append((first, ends[index], slots[index]))
    return found


def _grown(tensor: Tensor, slots: int) -> Tensor:
    grown = tensor.new_zeros(slots, *tensor.shape[1:])
    grown[: len(tensor)] = tensor
    return grown
