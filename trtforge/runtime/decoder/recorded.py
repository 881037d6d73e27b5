"""Runs the layers of a decoder; for steps of single-token rows on the CPU, from a recording of their kernel calls.

A recording is made for each number of rows, where the kernels compute everything between a step's hidden states and
those of the last layer. It saves the time that Python takes to call them, and leaves Python to other threads meanwhile.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from trtforge.runtime.adapters.rank_adapters import RankAdapters
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.decoder.attention import Batch
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.layer import Layer
from trtforge.runtime.native.bindings import Native, PagedRows
from trtforge.runtime.native.recorder import Arena, Recorder, current_recorder, recording
from trtforge.runtime.native.structures import Calls


@dataclass(frozen=True)
class _Inputs:
    """What the layers read, in memory that all recordings share: tables of blocks, then `_others`."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, rows: int, columns: int, hidden: Tensor, batch: Batch, rotations: Sequence[Rotation]) -> "_Inputs":
        """Memory for this many rows and columns of block numbers."""
        assert batch.paged is not None
        others = (each.new_empty(rows, *each.shape[1:]) for each in _others(hidden, batch, rotations))
        return cls((batch.paged.tables.new_zeros(rows, columns), *others))

    def __len__(self) -> int:
        return len(self.tensors[0])

    def first(self, rows: int) -> "_Inputs":
        """Those of the first rows."""
        return _Inputs(tuple(tensor[:rows] for tensor in self.tensors))

    def fill(self, hidden: Tensor, batch: Batch, rotations: Sequence[Rotation]) -> None:
        """Copy a step's."""
        assert batch.paged is not None
        tables, *others = self.tensors
        tables[:, : batch.paged.tables.shape[1]] = batch.paged.tables
        for own, new in zip(others, _others(hidden, batch, rotations), strict=True):
            own.copy_(new)

    def as_step(self, batch: Batch, rotations: Sequence[Rotation]) -> tuple[Tensor, Batch, tuple[Rotation, ...]]:
        """The step that the layers compute from these tensors."""
        assert batch.paged is not None
        tables, hidden, slots, lengths, *parts = self.tensors
        paged = PagedRows(tables, lengths, batch.paged.block_size)
        turned = zip(rotations, parts[::2], parts[1::2], strict=True)
        return hidden, replace(batch, slots=slots, paged=paged), tuple(replace(r, cos=c, sin=s) for r, c, s in turned)


def _others(hidden: Tensor, batch: Batch, rotations: Sequence[Rotation]) -> list[Tensor]:
    """Hidden states, slots, lengths, then cosines and sines of each rotation."""
    assert batch.paged is not None
    return [hidden, batch.slots, batch.paged.lengths, *(part for each in rotations for part in (each.cos, each.sin))]


@dataclass(frozen=True)
class _Recording:
    inputs: _Inputs
    calls: Calls
    kept: Sequence[object]
    output: Tensor
    states: list[Tensor]


class Layers:
    """The layers of a rank. `kernels`: given if recordings may be made; `longest`: maximum length of a sequence.

    `kept`: layers whose inputs (tokens, hidden) the last step left in `states`; their number stands for the output.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        kernels: Native | None,
        longest: int,
        adapters: RankAdapters | None = None,
        kept: Collection[int] = (),
    ) -> None:
        self.states: list[Tensor] = []
        self._kept = kept
        self._kept_arena = Arena()
        self._layers = layers
        self._kernels = kernels
        self._longest = longest
        self._arena = Arena()
        self._inputs: _Inputs | None = None
        self._adapters = adapters
        self._moves = 0  # of the adapters' memory, when the recordings with adapters were made
        self._recordings: dict[tuple[int, bool], _Recording] = {}

    @property
    def recorded_rows(self) -> tuple[int, ...]:
        """The numbers of rows for which there are recordings."""
        return tuple(sorted({rows for rows, _ in self._recordings}))

    def __call__(
        self, hidden: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: Sequence[LayerCache]
    ) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), which the next step may overwrite, and so `states`."""
        recorder = current_recorder()
        if recorder is not None:  # of the whole step
            return self._noted(recorder, hidden, batch, rotations, cache)
        if self._kernels is None or batch.paged is None or batch.context or len(batch.slots) != len(hidden):
            return self._computed(hidden, batch, rotations, cache)
        columns = -(-self._longest // batch.paged.block_size)
        if batch.paged.tables.shape[1] > columns:  # drafts beyond the longest sequence
            return self._computed(hidden, batch, rotations, cache)
        key = len(hidden), self._adapted()
        if key not in self._recordings:
            return self._recorded(key, columns, hidden, batch, rotations, cache)
        found = self._recordings[key]
        found.inputs.fill(hidden, batch, rotations)
        self._kernels.replay(found.calls)
        self.states = found.states
        return found.output

    def _adapted(self) -> bool:
        """Whether the step has adapters; forgets recordings that read them where they were before."""
        adapters = self._adapters
        if adapters is None or not adapters.used:
            return False
        if adapters.moves != self._moves:
            self._moves = adapters.moves
            self._recordings = {key: each for key, each in self._recordings.items() if not key[1]}
        return True

    def _computed(
        self, hidden: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: Sequence[LayerCache]
    ) -> Tensor:
        self.states = []
        for index, (layer, layer_cache) in enumerate(zip(self._layers, cache, strict=True)):
            if index in self._kept:
                self.states.append(hidden)
            hidden = layer(hidden, batch, rotations, layer_cache)
        if len(self._layers) in self._kept:
            self.states.append(hidden)
        return hidden

    def _recorded(
        self,
        key: tuple[int, bool],
        columns: int,
        hidden: Tensor,
        batch: Batch,
        rotations: tuple[Rotation, ...],
        cache: Sequence[LayerCache],
    ) -> Tensor:
        """Compute a step and keep its kernel calls; if torch computes a part of it, never record again."""
        rows, _ = key
        if self._inputs is None or len(self._inputs) < rows:
            self._inputs = _Inputs.of(2 * rows, columns, hidden, batch, rotations)
        inputs = self._inputs.first(rows)
        inputs.fill(hidden, batch, rotations)
        with recording(self._arena) as recorder:
            hidden = self._noted(recorder, *inputs.as_step(batch, rotations), cache)
        if recorder.complete:
            self._recordings[key] = _Recording(inputs, *recorder.calls(), hidden, self.states)
        else:
            self._kernels = None
        return hidden

    def _noted(
        self,
        recorder: Recorder,
        hidden: Tensor,
        batch: Batch,
        rotations: tuple[Rotation, ...],
        cache: Sequence[LayerCache],
    ) -> Tensor:
        """Compute a step whose kernel calls a recorder notes; results of all recordings lie in the same memory."""
        if self._kernels is None:
            return self._computed(hidden, batch, rotations, cache)
        states: list[Tensor] = []
        self._kept_arena.turn()
        with recorder.into(self._arena):
            for index, (layer, layer_cache) in enumerate(zip(self._layers, cache, strict=True)):
                self._arena.turn()
                if index in self._kept:
                    with recorder.into(self._kept_arena):
                        states.append(self._kernels.add(hidden, hidden, 0.0))  # a copy: later layers overwrite it
                hidden = layer(hidden, batch, rotations, layer_cache)
        if len(self._layers) in self._kept:
            states.append(hidden)
        self.states = states
        return hidden
