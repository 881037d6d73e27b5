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

from trtforge.runtime.decoder.attention import Batch
from trtforge.runtime.decoder.padding import padded_rows
from trtforge.runtime.native.bindings import PagedRows
from trtforge.runtime.scheduling.batch import Step

MOST_ROWS = 512
"""Of a graph: the products of more rows take longer than their launches."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outputs:
    """Of a step: logits (rows, columns of this rank), and what `Decoder.kept` has."""

    logits: Tensor | None
    last: Tensor | None
    states: list[Tensor]

    def first(self, rows: int) -> "Outputs":
        """Those of the first rows. The next step overwrites them."""
        if self.logits is not None and rows == len(self.logits):
            return self
        logits = None if self.logits is None else self.logits[:rows]
        last = None if self.last is None else self.last[:rows]
        return Outputs(logits, last, [each[:rows] for each in self.states])


Compute = Callable[[Batch], Outputs]
Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], object]] | None]
"""From a computation to its outputs and to what computes them again, from the same memory into the same memory.

None where what is captured is not the whole computation; a RuntimeError if it fails.
"""


class Inputs(Protocol):
    """The memory that a graph reads."""

    def fill(self, step: Step) -> None:
        """Copy a step's integers, which are of at most as many rows and columns of block tables."""

    def batch(self) -> Batch:
        """The step that is computed from this memory."""


class Memory(Protocol):
    """Where the inputs of graphs lie."""

    @property
    def columns(self) -> int:
        """Of the block tables of the longest sequence."""

    def rows(self, rows: int) -> int:
        """The rows of the graph that computes steps of so many."""

    def inputs(self, rows: int) -> Inputs:
        """The inputs of a graph of so many rows."""


@dataclass(frozen=True)
class PaddedInputs:
    """What `rows` rows read: int64 (4 + columns of the block tables, rows), so that what a step fills lies together.

    Tokens, positions, slots and lengths, then the tables, a row for each column. Rows that pad a step write to the
    block `spare` and attend to it. `windowed`: what layers with windows read, if they have blocks of their own.
    """

    integers: Tensor
    block_size: int
    spare: int
    windowed: "PaddedInputs | None" = None

    def fill(self, step: Step) -> None:
        """See Inputs: in one transfer, and another for layers with windows."""
        count, used = step.tables.shape
        filled = np.zeros((4 + used, self.integers.shape[1]), dtype=np.int64)
        filled[0, :count], filled[1, :count] = step.tokens, step.starts
        filled[2, :count] = step.slots(np.arange(count), step.starts, self.block_size)
        filled[3, :count] = step.starts + 1
        filled[4:, :count] = step.tables.T
        filled[2, count:], filled[3, count:], filled[4, count:] = self.spare * self.block_size, 1, self.spare
        self.integers[: len(filled)].copy_(torch.from_numpy(filled))
        if self.windowed is not None and (windowed := step.windowed) is not None:
            self.windowed.fill(windowed)

    def batch(self) -> Batch:
        """See Inputs."""
        windowed = None if self.windowed is None else self.windowed.batch()
        return _batch(self.integers[:4], self.integers[4:].t(), self.block_size, windowed)


@dataclass(frozen=True)
class PaddedMemory:
    """On a GPU: graphs of few sizes, each with memory of its own. `window_spare`: as `spare`, of window blocks."""

    columns: int
    block_size: int
    spare: int
    device: torch.device
    window_spare: int | None = None

    def rows(self, rows: int) -> int:
        """See Memory."""
        return padded_rows(rows)

    def inputs(self, rows: int) -> PaddedInputs:
        """See Memory."""
        windowed = None if self.window_spare is None else PaddedInputs(*self._of(rows, self.window_spare))
        return PaddedInputs(*self._of(rows, self.spare), windowed)

    def _of(self, rows: int, spare: int) -> tuple[Tensor, int, int]:
        integers = torch.zeros(4 + self.columns, rows, dtype=torch.int64, device=self.device)
        return integers, self.block_size, spare


@dataclass(frozen=True)
class ExactInputs:
    """What a step of exactly so many rows reads: int64 tokens, positions, slots and lengths (4, rows), and tables.

    `windowed`: what layers with windows read, if they have blocks of their own.
    """

    integers: Tensor
    tables: Tensor
    block_size: int
    windowed: "ExactInputs | None" = None

    def fill(self, step: Step) -> None:
        """See Inputs."""
        integers, tables, starts = self.integers.numpy(), self.tables.numpy(), step.starts
        integers[0], integers[1], integers[3] = step.tokens, starts, starts + 1
        integers[2] = step.slots(np.arange(len(starts)), starts, self.block_size)
        tables[:, : step.tables.shape[1]] = step.tables
        if self.windowed is not None and (windowed := step.windowed) is not None:
            self.windowed.fill(windowed)

    def batch(self) -> Batch:
        """See Inputs."""
        windowed = None if self.windowed is None else self.windowed.batch()
        return _batch(self.integers, self.tables, self.block_size, windowed)


class ExactMemory:
    """On a CPU: a graph for each number of rows; they run one at a time, so all of them read the same memory.

    `windowed`: whether layers with windows have blocks of their own.
    """

    def __init__(self, columns: int, block_size: int, *, windowed: bool = False) -> None:
        self.columns = columns
        self._block_size = block_size
        self._windowed = ExactMemory(columns, block_size) if windowed else None
        self._integers = torch.zeros(4, 0, dtype=torch.int64)
        self._tables = torch.zeros(0, columns, dtype=torch.int64)

    def rows(self, rows: int) -> int:
        """See Memory."""
        return rows

    def inputs(self, rows: int) -> ExactInputs:
        """See Memory. Older graphs keep the memory that they have."""
        if rows > len(self._tables):
            self._integers = torch.zeros(4, 2 * rows, dtype=torch.int64)
            self._tables = torch.zeros(2 * rows, self.columns, dtype=torch.int64)
        windowed = None if self._windowed is None else self._windowed.inputs(rows)
        return ExactInputs(self._integers[:, :rows], self._tables[:rows], self._block_size, windowed)


def _batch(integers: Tensor, tables: Tensor, block_size: int, windowed: Batch | None) -> Batch:
    tokens, positions, slots, lengths = integers
    rows = len(tokens)
    return Batch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        logit_rows=torch.arange(rows, device=tokens.device),
        wanted=rows,
        length=0,
        generation=(),
        context=(),
        paged=PagedRows(tables, lengths, block_size),
        windowed=windowed,
    )


@dataclass(frozen=True)
class _Graph:
    inputs: Inputs
    outputs: Outputs
    replay: Callable[[], object]


class StepGraphs:
    """The graphs of a rank."""

    def __init__(self, compute: Compute, capture: Capture, memory: Memory) -> None:
        self._compute = compute
        self._capture: Capture | None = capture
        self._memory = memory
        self._graphs: dict[int, _Graph] = {}

    @property
    def captured_rows(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs."""
        return tuple(sorted(self._graphs))

    def execute(self, step: Step) -> Outputs | None:
        """The outputs of the step's rows; None, with nothing computed, if a graph does not compute such steps."""
        if not self._takes(step):
            return None
        rows = self._memory.rows(len(step.counts))
        graph = self._graphs.get(rows) or self._captured(rows, step)
        if graph is None:
            return None
        graph.inputs.fill(step)
        graph.replay()
        return graph.outputs.first(len(step.counts))

    def _takes(self, step: Step) -> bool:
        rows, columns = step.tables.shape
        return (
            self._capture is not None
            and rows <= MOST_ROWS
            and columns <= self._memory.columns  # drafts beyond the longest sequence have more
            and step.length == 0
            and not len(step.adapters)
            and bool((step.counts == 1).all() and (step.wanted == 1).all())
        )

    def _captured(self, rows: int, step: Step) -> _Graph | None:
        """A graph, whose capture computed the step; None if its operations cannot be captured: never try again."""
        assert self._capture is not None, "see _takes"
        inputs, captured = self._memory.inputs(rows), None
        inputs.fill(step)
        batch = inputs.batch()
        try:
            captured = self._capture(lambda: self._compute(batch))
        except RuntimeError as error:
            _LOG.warning("steps are computed without CUDA graphs, slower: %s", error)
        if captured is None:
            self._capture = None
            self._graphs = {}
            return None
        self._graphs[rows] = _Graph(inputs, *captured)
        return self._graphs[rows]
