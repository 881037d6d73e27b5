"""Checks the prompt tables of requests and converts their rows to the form used in steps."""

from torch import Tensor, frombuffer, int64
from torch.nn import functional

from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import UINT64_MAX, GenerationRequest, PromptTable
from trtforge.models.torch_tensors import all_finite
from trtforge.runtime.linears.kernels import DTYPES
from trtforge.runtime.ranks.source import Source
from trtforge.runtime.scheduling.integers import Ints
from trtforge.runtime.scheduling.virtual_tokens import VirtualTokens

_TABLE, _EXTRA_IDS = "prompt_embedding_table", "prompt_table_extra_ids"
_WORD = 8  # bytes of the int64 words in which a step sends the rows


class PromptTables:
    """Reads the tables of an engine's requests.

    A request may have max_prompt_embedding_table_size / max_batch_size rows, as in TensorRT-LLM
    (PromptTuningBuffers, cpp/tensorrt_llm/batch_manager/promptTuningBuffers.cpp).
    """

    def __init__(self, source: Source) -> None:
        self._batch = source.limits.max_batch_size
        self._most = source.forge.features.max_prompt_embedding_table_size // self._batch
        self._vocab_size, self._width = source.config.vocab_size, source.config.hidden_size
        self._dtype = DTYPES[source.forge.compute_dtype]

    def read(self, request: GenerationRequest) -> tuple[VirtualTokens | None, RequestError | None]:
        """The table rows in a request's prompt, or the error that refuses it; (None, None) without a table."""
        table = request.prompt_table
        if table is None:
            return None, None
        try:
            error = self._why_refused(request, table)
            if error is not None:
                return None, error
            numbers = frombuffer(bytearray(table.data), dtype=DTYPES[table.dtype]).view(table.rows, table.width)
            converted = numbers.to(self._dtype)
            if not all_finite(converted):
                hint = f"Send numbers that {str(self._dtype).removeprefix('torch.')} holds, the engine's data type."
                return None, RequestError(f"{_TABLE} has numbers that are not finite", hint=hint)
            return VirtualTokens.of(request.prompt, self._vocab_size, _words(converted), table.extra_ids), None
        except (TypeError, ValueError, KeyError, RuntimeError) as error:  # values of wrong types
            return None, RequestError(f"{_TABLE} cannot be read: {error!r:.200}", hint="Send rows of numbers.")

    def _why_refused(self, request: GenerationRequest, table: PromptTable) -> RequestError | None:
        prompt, first, rows = request.prompt, self._vocab_size, table.rows
        if not self._most:
            return RequestError(
                f"{_TABLE}: this engine does not support prompt tables",
                hint="Compile it with --feature max_prompt_embedding_table_size=… (rows of a request x "
                "max_batch_size), or leave the table out.",
            )
        if table.width != self._width:
            return RequestError(
                f"{_TABLE} has rows of {table.width} numbers, the model's hidden size is {self._width}",
                hint="Send embeddings that were made for this model.",
            )
        if rows < 1 or len(table.data) != rows * table.width * DTYPES[table.dtype].itemsize:
            return RequestError(
                f"{_TABLE} has {rows} rows and {len(table.data)} bytes of {table.dtype}", hint="Send whole rows."
            )
        if rows > self._most:
            return RequestError(
                f"{_TABLE} has {rows} rows, the limit of this engine is {self._most} per request",
                hint=f"Compile with --feature max_prompt_embedding_table_size={rows * self._batch}: rows of a request "
                f"times max_batch_size {self._batch}.",
            )
        if max(prompt, default=0) >= first + rows:
            return RequestError(
                f"the prompt has the id {max(prompt)}, beyond the {rows} rows of {_TABLE}",
                hint=f"Its rows have the ids {first} to {first + rows - 1}.",
            )
        if max(prompt, default=0) < first:
            return RequestError(
                f"{_TABLE}: the prompt uses none of its rows",
                hint=f"Its rows have the ids {first} to {first + rows - 1}.",
            )
        if table.extra_ids and len(table.extra_ids) != len(prompt):
            return RequestError(
                f"{_EXTRA_IDS} has {len(table.extra_ids)} ids, the prompt {len(prompt)} tokens",
                hint="Give one per prompt token: 0 for tokens of the vocabulary.",
            )
        if table.extra_ids and not 0 <= min(table.extra_ids) <= max(table.extra_ids) <= UINT64_MAX:
            return RequestError(f"{_EXTRA_IDS} has ids beyond 64 bits", hint=f"Give ids from 0 to {UINT64_MAX}.")
        if request.sampling.prompt_log_probs:
            return RequestError(
                f"{_TABLE}: the prompt has no log probabilities with a prompt table",
                hint="Request log probabilities of the output only, or the logits of the prompt.",
            )
        return None


def _words(numbers: Tensor) -> Ints:
    """Rows of numbers as rows of int64, each zero-padded to whole words."""
    values = _WORD // numbers.dtype.itemsize
    padded = functional.pad(numbers, (0, -numbers.shape[1] % values)).contiguous()
    words: Ints = padded.view(int64).numpy()
    return words
