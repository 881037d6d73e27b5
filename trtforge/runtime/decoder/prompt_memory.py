"""The steps of one whole prompt that have CUDA graphs, and the memory that these graphs read.

Without a graph, the GPU waits in these steps for Python, which launches a dozen kernels for each layer.
"""

import numpy as np
import torch
from torch import Tensor

from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.cuda.paged_chunks import PagedChunks
from trtforge.runtime.cuda.pinned import Staging
from trtforge.runtime.cuda.products import MOST_EXPANDED
from trtforge.runtime.decoder.batch import Batch, ContextRow
from trtforge.runtime.decoder.step_graphs import Shape
from trtforge.runtime.scheduling.batch import Step

_MOST_TOKENS = 2048
"""Maximum prompt length: with more tokens, kernels take longer than their launches, and results take more memory."""
_UNIT = 64  # graphs have lengths that are multiples of it
_NUMBERS_OF_HIDDEN = 16  # values that a layer keeps per token, in multiples of the hidden size: 13.5 in Llama 8B


def prompt_graph_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Approximate memory of prompt graphs: the intermediate results of the longest prompt, and expanded weights."""
    return (_MOST_TOKENS * _NUMBERS_OF_HIDDEN * spec.hidden_size + MOST_EXPANDED) * dtype.itemsize


class PromptInputs:
    """The inputs of a prompt of at most `tokens` tokens, in one tensor that one transfer fills.

    It contains, as int64, tokens, positions and slots, block numbers, the token that gives logits, and the prompt's
    only chunk. Padding tokens come after the prompt, so that no token of it attends to them; they write to the block
    `spare`. `windowed`: slots and block numbers of sliding-window layers with separate blocks.
    """

    def __init__(
        self, tokens: int, block_size: int, spare: int, device: torch.device, windowed: "PromptInputs | None" = None
    ) -> None:
        columns = -(-tokens // block_size)
        ends = np.cumsum([tokens, tokens, tokens, columns, 1]).tolist()
        integers = torch.zeros(1, ends[-1] + 3, dtype=torch.int64, device=device)
        self._ends = ends
        self._block_size = block_size
        self._spare = spare
        self._windowed = windowed
        self._staging = Staging(integers)
        token_ids, positions, slots, table, last, chunk = integers[0].tensor_split(ends)
        first, none = np.zeros(1, dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
        given = chunk.view(1, 3), table.view(1, columns)
        self._batch = Batch(
            tokens=token_ids,
            positions=positions,
            slots=slots,
            logit_rows=last,
            wanted=1,
            length=0,
            generation=(),
            context=(ContextRow(0, tokens, 0, none[0], device),),
            windowed=None if windowed is None else windowed.batch(),
            chunks=PagedChunks((first, first, np.array([tokens])), none, block_size, device, given),
        )

    def fill(self, step: Step, latest: Tensor | None = None) -> None:
        """See Inputs. `latest` is not used, because the host knows all tokens of a prompt."""
        (filled,) = self._staging.filled_next(1)
        tokens, positions, slots, table, last, chunk = np.split(filled, self._ends)
        rows, placed = step.positions()
        count, held = len(placed), -(-len(placed) // self._block_size)
        tokens[:count], positions[:count], last[0], chunk[:] = step.tokens, placed, count - 1, (0, 0, count)
        slots[:count], slots[count:] = step.slots(rows, placed, self._block_size), self._spare * self._block_size
        table[:held], table[held:] = step.tables[0, :held], self._spare
        self._staging.send(1)
        if self._windowed is not None and (windowed := step.windowed) is not None:
            self._windowed.fill(windowed)

    def batch(self) -> Batch:
        """See Inputs."""
        return self._batch


class PromptMemory:
    """Memory of graphs that compute one whole prompt. `spare`, `window_spare`: see `PaddedMemory`.

    The second prompt of about the same length gets a graph, because a capture takes as long as a few steps.
    """

    def __init__(self, block_size: int, spare: int, device: torch.device, window_spare: int | None = None) -> None:
        self._block_size = block_size
        self._spare = spare
        self._device = device
        self._window_spare = window_spare
        self._seen: set[int] = set()

    def shape(self, step: Step) -> Shape | None:
        """See Memory."""
        tokens = len(step.tokens)
        if len(step.counts) != 1 or step.starts[0] or step.wanted[0] > 1 or not 1 < tokens <= _MOST_TOKENS:
            return None
        if step.tokens.min() < 0:
            return None
        padded = -(-tokens // _UNIT) * _UNIT
        if padded not in self._seen:
            self._seen.add(padded)
            return None
        return Shape(padded, 1)

    def inputs(self, shape: Shape) -> PromptInputs:
        """See Memory."""
        size, device, spare = self._block_size, self._device, self._window_spare
        windowed = None if spare is None else PromptInputs(shape.rows, size, spare, device)
        return PromptInputs(shape.rows, size, self._spare, device, windowed)
