"""The steps of single-token rows that have graphs, and the memory that these graphs read."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.cuda.pinned import Staging
from trtforge.runtime.cuda.triton_support import power_from
from trtforge.runtime.decoder.batch import Batch, apart
from trtforge.runtime.decoder.latest import put_latest
from trtforge.runtime.decoder.padding import padded_rows
from trtforge.runtime.decoder.recorded import MOST_ROWS
from trtforge.runtime.decoder.step_graphs import Shape
from trtforge.runtime.native.bindings import PagedRows
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.integers import Ints


@dataclass(frozen=True)
class PaddedInputs:
    """The inputs of a graph on a GPU. `integers`: int64 (4 + block-table columns, rows), filled by one transfer.

    It contains tokens, positions, slots and lengths, then the block tables, a row for each column. Rows that pad a step
    write to the block `spare` and attend to it. `windowed`: the inputs of sliding-window layers with separate blocks.
    `apart`: see `batch.apart`; padding rows count as apart, because their results are not used.
    """

    integers: Tensor
    staging: Staging
    block_size: int
    spare: int
    apart: bool
    windowed: "PaddedInputs | None" = None

    def fill(self, step: Step, latest: Tensor | None = None) -> None:
        """See Inputs. One transfer, and another for sliding-window layers; the host waits for neither."""
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
    """On a GPU: graphs of few sizes, each with separate memory. `window_spare`: like `spare`, for window blocks."""

    columns: int
    block_size: int
    spare: int
    device: torch.device
    window_spare: int | None = None

    def shape(self, step: Step) -> Shape | None:
        """See Memory. All rows give logits."""
        if not _single_tokens(step, self.columns) or not step.wanted.all():
            return None
        rows = padded_rows(len(step.tokens))
        return Shape(rows, rows, apart(step))

    def inputs(self, shape: Shape) -> PaddedInputs:
        """See Memory."""
        rows, apart = shape.rows, shape.apart
        windowed = None if self.window_spare is None else PaddedInputs(*self._of(rows, self.window_spare), apart)
        return PaddedInputs(*self._of(rows, self.spare), apart, windowed)

    def _of(self, rows: int, spare: int) -> tuple[Tensor, Staging, int, int]:
        integers = torch.zeros(4 + self.columns, rows, dtype=torch.int64, device=self.device)
        return integers, Staging(integers), self.block_size, spare


@dataclass(frozen=True)
class CommonInputs:
    """The inputs of a graph on a CPU. `integers` (4, rows): tokens, positions, slots and lengths; `tables`: the blocks.

    At most the first `wanted` rows give logits. `windowed`: the inputs of sliding-window layers with separate blocks.
    """

    integers: Ints
    tables: Ints
    block_size: int
    wanted: int
    windowed: "CommonInputs | None" = None

    def fill(self, step: Step, latest: Tensor | None = None) -> None:
        """See Inputs."""
        (rows, columns), starts = step.tables.shape, step.starts
        integers = self.integers[:, :rows]
        integers[0], integers[1], integers[3] = step.tokens, starts, starts + 1
        integers[2] = step.slots(np.arange(rows), starts, self.block_size)
        self.tables[:rows, :columns] = step.tables
        put_latest(torch.from_numpy(integers[0]), step.tokens, latest)
        if self.windowed is not None and (windowed := step.windowed) is not None:
            self.windowed.fill(windowed)

    def batch(self) -> Batch:
        """See Inputs."""
        windowed = None if self.windowed is None else self.windowed.batch()
        integers, tables = torch.from_numpy(self.integers), torch.from_numpy(self.tables)
        return _batch(integers, tables, self.block_size, self.wanted, windowed)


class CommonMemory:
    """On a CPU: graphs for any number of rows up to a power of two.

    They run one at a time, so all of them read the same memory. `windowed`: whether sliding-window layers have separate
    blocks.
    """

    def __init__(self, columns: int, block_size: int, *, windowed: bool = False) -> None:
        self.columns = columns
        self._block_size = block_size
        self._windowed = CommonMemory(columns, block_size) if windowed else None
        self._integers = np.zeros((4, 0), dtype=np.int64)
        self._tables = np.zeros((0, columns), dtype=np.int64)

    def shape(self, step: Step) -> Shape | None:
        """See Memory. `apart` is not set: the CPU kernels cache all rows' keys and values before any row attends."""
        wanted = int(step.wanted.sum())
        if not _single_tokens(step, self.columns) or not wanted or not step.wanted[:wanted].all():
            return None
        return Shape(power_from(len(step.tokens)), power_from(wanted))

    def inputs(self, shape: Shape) -> CommonInputs:
        """See Memory. If this allocates larger memory, older graphs keep theirs."""
        rows = shape.rows
        if rows > len(self._tables):
            self._integers = np.zeros((4, 2 * rows), dtype=np.int64)
            self._tables = np.zeros((2 * rows, self.columns), dtype=np.int64)
        windowed = None if self._windowed is None else self._windowed.inputs(shape)
        return CommonInputs(self._integers[:, :rows], self._tables[:rows], self._block_size, shape.wanted, windowed)


def _single_tokens(step: Step, columns: int) -> bool:
    """Whether a step consists of single-token rows with at most `columns` columns of block numbers.

    Drafts beyond the maximum sequence length have more columns.
    """
    rows, used = step.tables.shape
    return rows <= MOST_ROWS and used <= columns and len(step.tokens) == rows


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
