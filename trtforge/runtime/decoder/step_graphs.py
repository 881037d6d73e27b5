"""Steps of single-token rows from graphs: one for each number of rows, captured at the first such step.

A graph is a CUDA graph, or recorded calls of CPU kernels. What captures it is given (`runtime.cuda.graph_capture`,
`runtime.native.call_capture`), so that nothing here depends on a device.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.cuda.pinned import Staging
from trtforge.runtime.decoder.attention import Batch, apart
from trtforge.runtime.decoder.latest import put_latest
from trtforge.runtime.decoder.padding import padded_rows
from trtforge.runtime.decoder.recent import Recent
from trtforge.runtime.decoder.recorded import MOST_RECORDINGS, MOST_ROWS
from trtforge.runtime.native.bindings import PagedRows
from trtforge.runtime.scheduling.batch import Ints, Step

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outputs:
    """Of a step: logits (wanted rows, columns of this rank), and what `Decoder.kept` has."""

    logits: Tensor | None
    last: Tensor | None
    states: list[Tensor]

    def first(self, rows: int, wanted: int) -> "Outputs":
        """Those of the first rows. The next step overwrites them."""
        logits = None if self.logits is None else self.logits[:wanted]
        last = None if self.last is None else self.last[:wanted]
        return Outputs(logits, last, [each[:rows] for each in self.states])


Compute = Callable[[Batch], Outputs]
Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], object]] | None]
"""Computes, and returns the outputs and what computes them again, from the same memory into the same memory.

None where what is captured is not the whole computation; a RuntimeError if it fails.
"""


class Inputs(Protocol):
    """The memory that a graph reads."""

    def fill(self, step: Step, latest: Tensor | None = None) -> None:
        """Copy a step's integers, which are of at most as many rows and columns of block tables.

        `latest`: see `put_latest`.
        """

    def batch(self) -> Batch:
        """The step that is computed from this memory."""


class Memory(Protocol):
    """Where the inputs of graphs lie."""

    @property
    def columns(self) -> int:
        """Of the block tables of the longest sequence."""

    @property
    def some_unwanted(self) -> bool:
        """Whether rows without logits may follow those with logits."""

    def rows(self, rows: int) -> int:
        """The rows of the graph that computes steps of so many."""

    def apart(self, step: Step) -> bool:
        """Whether the graph that computes a step takes only steps whose rows are apart, see `attention.apart`."""

    def inputs(self, rows: int, wanted: int, apart: bool) -> Inputs:
        """The inputs of a graph of so many rows, the first `wanted` of which give logits."""


@dataclass(frozen=True)
class PaddedInputs:
    """What `rows` rows read: int64 (4 + columns of the block tables, rows), so that what a step fills lies together.

    Tokens, positions, slots and lengths, then the tables, a row for each column. Rows that pad a step write to the
    block `spare` and attend to it. `windowed`: what layers with windows read, if they have blocks of their own.
    `apart`: see `attention.apart`; rows that pad a step count as apart, since nobody reads what they compute.
    """

    integers: Tensor
    staging: Staging
    block_size: int
    spare: int
    apart: bool
    windowed: "PaddedInputs | None" = None

    def fill(self, step: Step, latest: Tensor | None = None) -> None:
        """See Inputs: in one transfer, and another for layers with windows. The host does not wait for either."""
        count, used = step.tables.shape
        filled = self.staging.filled_next(4 + used)
        filled[0, :count], filled[1, :count] = step.tokens, step.starts
        filled[2, :count] = step.slots(np.arange(count), step.starts, self.block_size)
        filled[3, :count] = step.starts + 1
        filled[4:, :count] = step.tables.T
        filled[2, count:], filled[3, count:], filled[4, count:] = self.spare * self.block_size, 1, self.spare
        self.staging.send(4 + used)
        put_latest(self.integers[0], step.tokens, latest)
        if self.windowed is not None and (windowed := step.windowed) is not None:
            self.windowed.fill(windowed)

    def batch(self) -> Batch:
        """See Inputs."""
        windowed = None if self.windowed is None else self.windowed.batch()
        wanted = self.integers.shape[1]
        return _batch(self.integers[:4], self.integers[4:].t(), self.block_size, wanted, windowed, self.apart)


@dataclass(frozen=True)
class PaddedMemory:
    """On a GPU: graphs of few sizes, each with memory of its own. `window_spare`: as `spare`, of window blocks."""

    columns: int
    block_size: int
    spare: int
    device: torch.device
    window_spare: int | None = None

    @property
    def some_unwanted(self) -> bool:
        """See Memory."""
        return False

    def rows(self, rows: int) -> int:
        """See Memory."""
        return padded_rows(rows)

    def apart(self, step: Step) -> bool:
        """See Memory."""
        return apart(step)

    def inputs(self, rows: int, wanted: int, apart: bool) -> PaddedInputs:
        """See Memory. All rows give logits."""
        windowed = None if self.window_spare is None else PaddedInputs(*self._of(rows, self.window_spare), apart)
        return PaddedInputs(*self._of(rows, self.spare), apart, windowed)

    def _of(self, rows: int, spare: int) -> tuple[Tensor, Staging, int, int]:
        integers = torch.zeros(4 + self.columns, rows, dtype=torch.int64, device=self.device)
        return integers, Staging(integers), self.block_size, spare


@dataclass(frozen=True)
class ExactInputs:
    """What a step of exactly so many rows reads: tokens, positions, slots and lengths (4, rows), and tables.

    The first `wanted` rows give logits. `windowed`: what layers with windows read, if they have blocks of their own.
    """

    integers: Ints
    tables: Ints
    block_size: int
    wanted: int
    windowed: "ExactInputs | None" = None

    def fill(self, step: Step, latest: Tensor | None = None) -> None:
        """See Inputs."""
        integers, starts = self.integers, step.starts
        integers[0], integers[1], integers[3] = step.tokens, starts, starts + 1
        integers[2] = step.slots(np.arange(len(starts)), starts, self.block_size)
        self.tables[:, : step.tables.shape[1]] = step.tables
        put_latest(torch.from_numpy(integers[0]), step.tokens, latest)
        if self.windowed is not None and (windowed := step.windowed) is not None:
            self.windowed.fill(windowed)

    def batch(self) -> Batch:
        """See Inputs."""
        windowed = None if self.windowed is None else self.windowed.batch()
        integers, tables = torch.from_numpy(self.integers), torch.from_numpy(self.tables)
        return _batch(integers, tables, self.block_size, self.wanted, windowed)


class ExactMemory:
    """On a CPU: a graph for each number of rows; they run one at a time, so all of them read the same memory.

    `windowed`: whether layers with windows have blocks of their own.
    """

    some_unwanted = True

    def __init__(self, columns: int, block_size: int, *, windowed: bool = False) -> None:
        self.columns = columns
        self._block_size = block_size
        self._windowed = ExactMemory(columns, block_size) if windowed else None
        self._integers = np.zeros((4, 0), dtype=np.int64)
        self._tables = np.zeros((0, columns), dtype=np.int64)

    def rows(self, rows: int) -> int:
        """See Memory."""
        return rows

    def apart(self, step: Step) -> bool:
        """See Memory: the CPU kernels write what all rows cache before any attends to it."""
        return False

    def inputs(self, rows: int, wanted: int, apart: bool) -> ExactInputs:
        """See Memory. Older graphs keep the memory that they have."""
        if rows > len(self._tables):
            self._integers = np.zeros((4, 2 * rows), dtype=np.int64)
            self._tables = np.zeros((2 * rows, self.columns), dtype=np.int64)
        windowed = None if self._windowed is None else self._windowed.inputs(rows, wanted, apart)
        return ExactInputs(self._integers[:, :rows], self._tables[:rows], self._block_size, wanted, windowed)


def _batch(
    integers: Tensor, tables: Tensor, block_size: int, wanted: int, windowed: Batch | None, apart: bool = False
) -> Batch:
    tokens, positions, slots, lengths = integers
    return Batch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        logit_rows=None,
        wanted=wanted,
        length=0,
        generation=(),
        context=(),
        paged=PagedRows(tables, lengths, block_size, apart),
        windowed=windowed,
    )


@dataclass(frozen=True)
class _Graph:
    inputs: Inputs
    outputs: Outputs
    replay: Callable[[], object]


class StepGraphs:
    """The graphs of a rank: of the most recently used numbers of rows and of rows with logits, apart or not."""

    def __init__(self, compute: Compute, capture: Capture, memory: Memory) -> None:
        self._compute = compute
        self._capture: Capture | None = capture
        self._memory = memory
        self._graphs: Recent[tuple[int, int, bool], _Graph] = Recent(MOST_RECORDINGS)

    @property
    def can_capture(self) -> bool:
        """Whether captures have succeeded so far."""
        return self._capture is not None

    @property
    def captured_rows(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs."""
        return tuple(sorted({rows for rows, *_ in self._graphs}))

    def execute(self, step: Step, latest: Tensor | None = None) -> Outputs | None:
        """The outputs of the step's rows; None, with nothing computed, if a graph does not compute such steps.

        `latest`: see `put_latest`.
        """
        if not self._takes(step):
            return None
        count, wanted = len(step.counts), int(step.wanted.sum())
        rows = self._memory.rows(count)
        key = rows, wanted if wanted < count else rows, self._memory.apart(step)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._captured(*key, step, latest)
        else:
            graph.inputs.fill(step, latest)
            graph.replay()
        if graph is None:
            return None
        return graph.outputs if key[:2] == (count, wanted) else graph.outputs.first(count, wanted)

    def _takes(self, step: Step) -> bool:
        rows, columns = step.tables.shape
        return (
            self._capture is not None
            and rows <= MOST_ROWS
            and columns <= self._memory.columns  # drafts beyond the longest sequence have more
            and len(step.tokens) == rows
            and step.length == 0
            and not len(step.adapters)
            and self._takes_wanted(step)
        )

    def _takes_wanted(self, step: Step) -> bool:
        """Whether the first rows have logits, and others only where they may."""
        if step.wanted.all():
            return True
        with_logits = int(step.wanted.sum())
        return self._memory.some_unwanted and with_logits > 0 and bool(step.wanted[:with_logits].all())

    def _captured(self, rows: int, wanted: int, apart: bool, step: Step, latest: Tensor | None) -> _Graph | None:
        """A graph, whose capture computed the step; None if its operations cannot be captured: never try again."""
        assert self._capture is not None, "see _takes"
        inputs, captured = self._memory.inputs(rows, wanted, apart), None
        inputs.fill(step, latest)
        batch = inputs.batch()
        try:
            captured = self._capture(lambda: self._compute(batch))
        except RuntimeError as error:
            _LOG.warning("steps are computed without CUDA graphs, slower: %s", error)
        if captured is None:
            self._capture = None
            self._graphs.clear()
            return None
        graph = _Graph(inputs, *captured)
        self._graphs.put((rows, wanted, apart), graph)
        return graph
