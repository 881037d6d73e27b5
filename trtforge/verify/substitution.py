"""Replaces Hugging Face modules by linear layers of a checkpoint, computed as in the embedded engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtforge.models.checkpoint_plan import CheckpointPlan
from trtforge.models.content import Quantized, Target
from trtforge.runtime.architecture.layout import GatedSlot, LinearSlot, rank_slots
from trtforge.runtime.linears.kernels import kernel_of
from trtforge.runtime.linears.linear import Linear, Placement
from trtforge.runtime.linears.packing import sparse_layers
from trtforge.runtime.linears.stored import take_linear
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.ranks.source import open_model

_PLACEMENT = Placement(torch.device("cpu"), torch.float32)


@dataclass
class _Matrix:
    """One matrix of the checkpoint, computed once per input; several modules may share its outputs."""

    name: str
    linear: Linear
    _input: Tensor | None = field(default=None)
    _output: Tensor | None = field(default=None)

    def __call__(self, x: Tensor) -> Tensor:
        if self._output is None or self._input is not x:
            self._input, self._output = x, self.linear(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])
        return self._output


class Substitution:
    """The linear layers of a one-rank checkpoint. `plan`: the plan of its conversion."""

    def __init__(self, checkpoint: Path, plan: CheckpointPlan) -> None:
        source = open_model(checkpoint)
        self._spec, self._kernels = source.spec(0), source.forge.kernels
        self._weights = Weights.open(checkpoint, 0)
        self._slots = dict(_linear_slots(rank_slots(self._spec, sparse_layers(self._spec, self._weights))))
        self._rows: dict[str, tuple[str, Tensor]] = {}
        for target in plan.targets:
            if isinstance(target.content, Quantized):
                self._rows |= dict(_rows_of(target, target.content))

    def takes(self, module: str) -> bool:
        """Whether a module, by its Hugging Face name, is quantised in the checkpoint."""
        return module in self._rows

    @contextmanager
    def in_place(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Within the block, `modules` (by name) compute with the checkpoint's matrices."""
        matrices = {name: self._load(name) for name in {self._rows[module][0] for module in modules}}
        for name, module in modules.items():
            matrix, rows = self._rows[name]
            setattr(module, "forward", _forward(matrices[matrix], rows))  # noqa: B010
        try:
            yield
        finally:
            for module in modules.values():
                del module.forward

    def _load(self, name: str) -> _Matrix:
        slot = self._slots[name]
        kernel = kernel_of(self._spec, self._kernels, name)
        packed = kernel.pack(take_linear(self._spec, self._weights, slot), _PLACEMENT.dtype)
        weights = Weights.of({f"{name}.{part}": tensor.contiguous() for part, tensor in packed.items()})
        return _Matrix(name, kernel.load(weights, name, (slot.out, slot.inputs), _PLACEMENT, bias=True))


def _forward(matrix: _Matrix, rows: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: matrix(x)[..., rows]


def _linear_slots(slots: Any) -> Iterator[tuple[str, LinearSlot]]:
    for slot in slots:
        parts = (slot.fc, slot.gate) if isinstance(slot, GatedSlot) else (slot,)
        yield from ((part.module, part) for part in parts if isinstance(part, LinearSlot))


def _rows_of(target: Target, content: Quantized) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """For each module of a matrix: the matrix's name, and the indices of the module's outputs in it."""
    name = target.spec.name.removesuffix(".weight")
    ranges: dict[str, list[tuple[range, int]]] = {}
    first = 0
    for piece in content.pieces:
        for rows in piece.cuts[0].rows:
            ranges.setdefault(piece.source.removesuffix(".weight"), []).append((rows, first))
            first += len(rows)
    for module, parts in ranges.items():
        order = torch.empty(max(rows.stop for rows, _ in parts), dtype=torch.int64)
        for rows, start in parts:
            order[rows.start : rows.stop] = torch.arange(start, start + len(rows))
        yield module, (name, order)
