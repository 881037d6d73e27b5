"""Runs the layers of a decoder. On the CPU, steps of single-token rows are replayed from recorded kernel calls.

A recording works for any number of rows up to a power of two. It requires that kernels compute everything between a
step's hidden states and those of the last layer. It saves the time of Python's calls and leaves Python to other threads
meanwhile.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from trtforge.runtime.adapters.rank_adapters import RankAdapters
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.cuda.triton_support import power_from
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.layer import Layer
from trtforge.runtime.decoder.recent import Recent
from trtforge.runtime.native.bindings import Native, PagedRows
from trtforge.runtime.native.call_capture import CallCapture, Replay
from trtforge.runtime.native.recorder import Arena, Recorder, current_recorder

MOST_ROWS = 512
"""Maximum rows of a recorded step: products of more rows take much longer than their calls, and MLPs compute many rows
in parts that torch concatenates."""

MOST_RECORDINGS = 64
"""Maximum recordings of a rank, which keeps the most recently used ones. One takes about 30 KB per layer."""


@dataclass(frozen=True)
class _Inputs:
    """The layers' inputs, in memory that recordings share. `shared`: see `_shared`; `places`: tables and slots of each
    of the `_views`."""

    shared: tuple[Tensor, ...]
    places: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, rows: int, columns: int, hidden: Tensor, batch: Batch, rotations: Sequence[Rotation]) -> "_Inputs":
        """Memory for this many rows and columns of block numbers."""
        shared = (each.new_empty(rows, *each.shape[1:]) for each in _shared(hidden, batch, rotations))
        places = ((paged.tables.new_zeros(rows, columns), view.slots.new_empty(rows)) for view, paged in _views(batch))
        return cls(tuple(shared), tuple(places))

    def __len__(self) -> int:
        return len(self.shared[0])

    def first(self, rows: int) -> "_Inputs":
        """The inputs of the first rows."""
        places = ((tables[:rows], slots[:rows]) for tables, slots in self.places)
        return _Inputs(tuple(tensor[:rows] for tensor in self.shared), tuple(places))

    def fill(self, hidden: Tensor, batch: Batch, rotations: Sequence[Rotation]) -> None:
        """Copy a step's inputs."""
        for own, new in zip(self.shared, _shared(hidden, batch, rotations), strict=True):
            own.copy_(new)
        for (tables, slots), (view, paged) in zip(self.places, _views(batch), strict=True):
            tables[:, : paged.tables.shape[1]] = paged.tables
            slots.copy_(view.slots)

    def as_step(self, batch: Batch, rotations: Sequence[Rotation]) -> tuple[Tensor, Batch, tuple[Rotation, ...]]:
        """The step that the layers compute from these tensors."""
        hidden, lengths, *parts = self.shared
        seen = parts.pop(0) if batch.paged is not None and batch.paged.seen is not None else None
        views = [
            replace(view, slots=slots, paged=PagedRows(tables, lengths, paged.block_size, seen=seen))
            for (tables, slots), (view, paged) in zip(self.places, _views(batch), strict=True)
        ]
        turned = zip(rotations, parts[::2], parts[1::2], strict=True)
        step = views[0] if len(views) == 1 else replace(views[0], windowed=views[1])
        return hidden, step, tuple(replace(each, cos=cos, sin=sin) for each, cos, sin in turned)


def _views(batch: Batch) -> list[tuple[Batch, PagedRows]]:
    """The step and its rows as layers see them; then as sliding-window layers do, if they have separate blocks."""
    views = [batch] if batch.windowed is None else [batch, batch.windowed]
    return [(view, view.paged) for view in views if view.paged is not None]


def _shared(hidden: Tensor, batch: Batch, rotations: Sequence[Rotation]) -> list[Tensor]:
    """Hidden states, lengths, `seen` if there are draft trees, then cosines and sines of each rotation."""
    assert batch.paged is not None
    seen = [] if batch.paged.seen is None else [batch.paged.seen]
    return [hidden, batch.paged.lengths, *seen, *(part for each in rotations for part in (each.cos, each.sin))]


class _Key(NamedTuple):
    """The steps that a recording computes: at most `rows` rows, with or without adapters and draft trees."""

    rows: int
    adapted: bool
    trees: bool


@dataclass(frozen=True)
class _Recording:
    inputs: _Inputs
    replay: Replay
    output: Tensor
    states: list[Tensor]


class Layers:
    """The layers of a rank. `kernels`: given if steps may be recorded; `longest`: maximum length of a sequence.

    `kept`: indices of layers whose inputs (tokens, hidden) a step leaves in `states`; the number of layers stands for
    the output of the last one.
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
        self._capture = None if kernels is None else CallCapture(kernels)
        self._inputs: dict[bool, _Inputs] = {}  # for steps without and with draft trees
        self._adapters = adapters
        self._moves = 0  # moves of the adapters' memory before the recordings with adapters were made
        self._recordings: Recent[_Key, _Recording] = Recent(MOST_RECORDINGS)

    @property
    def can_record(self) -> bool:
        """Whether kernels computed all of the recorded steps so far."""
        return self._kernels is not None

    @property
    def recorded_rows(self) -> tuple[int, ...]:
        """The largest numbers of rows of the recordings."""
        return tuple(sorted({key.rows for key in self._recordings}))

    def __call__(
        self, hidden: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: Sequence[LayerCache]
    ) -> Tensor:
        """(tokens, hidden) to (tokens, hidden). The next step may overwrite the result and `states`."""
        recorder = current_recorder()
        if recorder is not None:  # the whole step is being recorded
            return self._noted(recorder, hidden, batch, rotations, cache)
        if self._kernels is None or batch.paged is None or batch.context:
            return self._computed(hidden, batch, rotations, cache)
        if not len(batch.slots) == len(hidden) <= MOST_ROWS:
            return self._computed(hidden, batch, rotations, cache)
        columns = -(-self._longest // batch.paged.block_size)
        if batch.paged.tables.shape[1] > columns:  # drafts beyond the maximum length
            return self._computed(hidden, batch, rotations, cache)
        key = _Key(power_from(len(hidden)), self._adapted(), batch.paged.seen is not None)
        found = self._recordings.get(key) or self._recorded(key, columns, hidden, batch, rotations, cache)
        if found is None:
            return self._computed(hidden, batch, rotations, cache)
        rows = len(hidden)
        found.inputs.first(rows).fill(hidden, batch, rotations)
        found.replay(rows, rows)
        self.states = [each[:rows] for each in found.states]
        return found.output[:rows]

    def _adapted(self) -> bool:
        """Whether the step has adapters. Drops recordings that read adapters from memory that has moved."""
        adapters = self._adapters
        if adapters is None or not adapters.used:
            return False
        if adapters.moves != self._moves:
            self._moves = adapters.moves
            for key in self._recordings:
                if key.adapted:
                    self._recordings.drop(key)
        return True

    def _computed(
        self, hidden: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: Sequence[LayerCache]
    ) -> Tensor:
        self.states = []
        change: Tensor | None = None
        for index, (layer, layer_cache) in enumerate(zip(self._layers, cache, strict=True)):
            if index in self._kept:
                hidden, change = layer.summed(hidden, change), None
                self.states.append(hidden)
            hidden, change = layer(hidden, change, batch, rotations, layer_cache)
        hidden = hidden if change is None else self._layers[-1].summed(hidden, change)
        if len(self._layers) in self._kept:
            self.states.append(hidden)
        return hidden

    def _recorded(
        self,
        key: _Key,
        columns: int,
        hidden: Tensor,
        batch: Batch,
        rotations: tuple[Rotation, ...],
        cache: Sequence[LayerCache],
    ) -> _Recording | None:
        """Record a step's kernel calls without computing it. None if torch computes a part of it; nothing is recorded
        after that."""
        assert self._capture is not None, "kernels compute"
        rows, memory = key.rows, self._inputs.get(key.trees)
        if memory is None or len(memory) < rows:
            memory = self._inputs[key.trees] = _Inputs.of(2 * rows, columns, hidden, batch, rotations)
        inputs = memory.first(rows)
        captured = self._capture(lambda: self(*inputs.as_step(batch, rotations), cache), rows, rows)
        if captured is None:
            self._kernels = None
            return None
        found = _Recording(inputs, captured[1], captured[0], self.states)
        self._recordings.put(key, found)
        return found

    def _noted(
        self,
        recorder: Recorder,
        hidden: Tensor,
        batch: Batch,
        rotations: tuple[Rotation, ...],
        cache: Sequence[LayerCache],
    ) -> Tensor:
        """Run a step while its kernel calls are recorded. The results of all recordings share memory."""
        if self._kernels is None:
            return self._computed(hidden, batch, rotations, cache)
        states: list[Tensor] = []
        change: Tensor | None = None
        self._kept_arena.turn()
        with recorder.into(self._arena):
            for index, (layer, layer_cache) in enumerate(zip(self._layers, cache, strict=True)):
                self._arena.turn()
                if index in self._kept:
                    hidden, change = layer.summed(hidden, change), None
                    with recorder.into(self._kept_arena):
                        states.append(self._kernels.add(hidden, hidden, 0.0))  # a copy: later layers overwrite it
                hidden, change = layer(hidden, change, batch, rotations, layer_cache)
            hidden = hidden if change is None else self._layers[-1].summed(hidden, change)
        if len(self._layers) in self._kept:
            states.append(hidden)
        self.states = states
        return hidden
