"""Computes steps with graphs: the first step of a shape captures a graph, which is replayed for this and later steps.

A graph is a CUDA graph, or recorded calls of CPU kernels. The capture function is passed in
(`runtime.cuda.graph_capture`, `runtime.native.call_capture`), so this module is independent of the device.
`graph_memory` and `prompt_memory` decide which steps have graphs and where these read their inputs.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.recent import Recent
from trtforge.runtime.decoder.recorded import MOST_RECORDINGS
from trtforge.runtime.scheduling.batch import Step

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outputs:
    """The outputs of a step: logits (wanted rows, columns of this rank); `last` and `states` as in `Decoder.kept`."""

    logits: Tensor | None
    last: Tensor | None
    states: list[Tensor]

    def first(self, rows: int, wanted: int) -> "Outputs":
        """The outputs of the first `rows` rows and `wanted` logits. The next step overwrites them."""
        logits = None if self.logits is None else self.logits[:wanted]
        last = None if self.last is None else self.last[:wanted]
        return Outputs(logits, last, [each[:rows] for each in self.states])


Compute = Callable[[Batch], Outputs]


class Replay(Protocol):
    """Repeats a captured computation, from the same inputs into the same outputs."""

    def __call__(self, rows: int, wanted: int, /) -> object:
        """Compute at least `rows` rows, and the logits of at least the first `wanted`."""


Capture = Callable[[Callable[[], Outputs], int, int], tuple[Outputs, Replay] | None]
"""Captures a computation with its numbers of rows and of rows with logits; returns its outputs and their replay.

The outputs are undefined until the first replay. None if the whole computation cannot be captured; raises RuntimeError
if the capture fails.
"""


class Inputs(Protocol):
    """The memory that a graph reads."""

    def fill(self, step: Step, latest: Tensor | None = None) -> None:
        """Copy the integers of a step with at most as many rows and block-table columns as this memory.

        `latest`: see `put_latest`.
        """

    def batch(self) -> Batch:
        """The step that reads this memory."""


@dataclass(frozen=True)
class Shape:
    """The steps that a graph computes: at most `rows` rows, of which the first `wanted` have logits.

    `apart`: see `batch.apart`; False if the graph does not depend on it.
    """

    rows: int
    wanted: int
    apart: bool = False


class Memory(Protocol):
    """Provides the memory that graphs read."""

    def shape(self, step: Step) -> Shape | None:
        """The shape of the graph for a step; None if no graph computes it, or not yet."""

    def inputs(self, shape: Shape) -> Inputs:
        """The inputs of a graph of this shape."""


@dataclass(frozen=True)
class _Graph:
    inputs: Inputs
    outputs: Outputs
    replay: Replay


class StepGraphs:
    """The graphs of a rank, of the shapes that were used most recently."""

    def __init__(self, compute: Compute, capture: Capture, memory: Memory) -> None:
        self._compute = compute
        self._capture: Capture | None = capture
        self._memory = memory
        self._graphs: Recent[Shape, _Graph] = Recent(MOST_RECORDINGS)

    @property
    def can_capture(self) -> bool:
        """Whether captures have succeeded so far."""
        return self._capture is not None

    @property
    def captured_rows(self) -> tuple[int, ...]:
        """The numbers of rows for which there are graphs."""
        return tuple(sorted({shape.rows for shape in self._graphs}))

    def execute(self, step: Step, latest: Tensor | None = None) -> Outputs | None:
        """The outputs of a step; None, with nothing computed, if no graph computes steps like it.

        `latest`: see `put_latest`.
        """
        if self._capture is None or step.length or len(step.adapters) or len(step.embeddings) or len(step.seen):
            return None
        shape = self._memory.shape(step)
        if shape is None:
            return None
        graph = self._graphs.get(shape) or self._captured(shape, step, latest)
        if graph is None:
            return None
        rows, wanted = len(step.tokens), int(step.wanted.sum())
        graph.inputs.fill(step, latest)
        graph.replay(rows, wanted)
        return graph.outputs if (shape.rows, shape.wanted) == (rows, wanted) else graph.outputs.first(rows, wanted)

    def _captured(self, shape: Shape, step: Step, latest: Tensor | None) -> _Graph | None:
        """Capture a graph for a step and others of its shape. None if this fails; nothing is captured after that."""
        assert self._capture is not None, "see execute"
        inputs, captured = self._memory.inputs(shape), None
        inputs.fill(step, latest)
        batch = inputs.batch()
        try:
            captured = self._capture(lambda: self._compute(batch), shape.rows, shape.wanted)
        except RuntimeError as error:
            _LOG.warning("some steps are computed without CUDA graphs, slower: %s", error)
        if captured is None:
            self._capture = None
            self._graphs.clear()
            return None
        graph = _Graph(inputs, *captured)
        self._graphs.put(shape, graph)
        return graph
