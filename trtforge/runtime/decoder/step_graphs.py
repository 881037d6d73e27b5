"""Steps of single-token rows from graphs: one for each padded number of rows, captured at the first such step.

Rows that pad a step write to a spare block and attend to it. What captures is given (`runtime.cuda.graph_capture`), so
that nothing here depends on a device.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

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
        """Those of the first rows. The next step overwrites all but the logits."""
        logits = None if self.logits is None else self.logits[:rows].clone()
        last = None if self.last is None else self.last[:rows]
        return Outputs(logits, last, [each[:rows] for each in self.states])


Compute = Callable[[Batch], Outputs]
Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], object]]]
"""From a computation to its outputs and to what computes them again, from the same memory into the same memory."""


@dataclass(frozen=True)
class Inputs:
    """What `rows` rows read: int64 (4 + columns of the block tables, rows), so that what a step fills lies together.

    Tokens, positions, slots and lengths, then the tables, a row for each column.
    """

    integers: Tensor
    block_size: int
    spare: int

    @classmethod
    def of(cls, rows: int, columns: int, block_size: int, spare: int, device: torch.device) -> "Inputs":
        """Memory for this many rows. `spare`: the block of rows that pad a step."""
        return cls(torch.zeros(4 + columns, rows, dtype=torch.int64, device=device), block_size, spare)

    def fill(self, step: Step) -> None:
        """Copy a step's, which has at most as many rows and columns, in one transfer."""
        count, used = step.tables.shape
        filled = np.zeros((4 + used, self.integers.shape[1]), dtype=np.int64)
        filled[0, :count], filled[1, :count] = step.tokens, step.starts
        filled[2, :count] = step.slots(np.arange(count), step.starts, self.block_size)
        filled[3, :count] = step.starts + 1
        filled[4:, :count] = step.tables.T
        filled[2, count:], filled[3, count:], filled[4, count:] = self.spare * self.block_size, 1, self.spare
        self.integers[: len(filled)].copy_(torch.from_numpy(filled))

    def batch(self) -> Batch:
        """The step that is computed from this memory."""
        tokens, positions, slots, lengths = self.integers[:4]
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
            paged=PagedRows(self.integers[4:].t(), lengths, self.block_size),
        )


@dataclass(frozen=True)
class _Graph:
    inputs: Inputs
    outputs: Outputs
    replay: Callable[[], object]


class StepGraphs:
    """The graphs of a rank. `columns`: of the block tables of its longest sequence; `spare`: a block of no sequence."""

    def __init__(
        self, compute: Compute, capture: Capture, *, columns: int, block_size: int, spare: int, device: torch.device
    ) -> None:
        self._compute = compute
        self._capture: Capture | None = capture
        self._columns = columns
        self._block_size = block_size
        self._spare = spare
        self._device = device
        self._graphs: dict[int, _Graph] = {}

    @property
    def captured_rows(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs."""
        return tuple(sorted(self._graphs))

    def execute(self, step: Step) -> Outputs | None:
        """The outputs of the step's rows; None, with nothing computed, if a graph does not compute such steps."""
        if not self._takes(step):
            return None
        rows = padded_rows(len(step.counts))
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
            and columns <= self._columns  # drafts beyond the longest sequence have more
            and step.length == 0
            and not len(step.adapters)
            and bool((step.counts == 1).all() and (step.wanted == 1).all())
        )

    def _captured(self, rows: int, step: Step) -> _Graph | None:
        """A graph, whose warm-ups computed the step; None if its operations cannot be captured: never try again."""
        assert self._capture is not None, "see _takes"
        inputs = Inputs.of(rows, self._columns, self._block_size, self._spare, self._device)
        inputs.fill(step)
        batch = inputs.batch()
        try:
            outputs, replay = self._capture(lambda: self._compute(batch))
        except RuntimeError as error:
            _LOG.warning("steps are computed without CUDA graphs, slower: %s", error)
            self._capture = None
            self._graphs = {}
            return None
        self._graphs[rows] = _Graph(inputs, outputs, replay)
        return self._graphs[rows]
