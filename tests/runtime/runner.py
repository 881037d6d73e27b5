"""Logits of whole token sequences, from a checkpoint or an engine with all its ranks: by processes as an engine's."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError
from trtforge.runtime.decoder.kv_capacity import KvMemory
from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.source import Source, open_model
from trtforge.runtime.scheduling.batch import Step

_TOKENS_AT_ONCE = 2048


class Runner:
    """Computes one sequence at a time. A context manager, because ranks other than 0 are processes."""

    def __init__(self, source: Source, ranks: RankGroup) -> None:
        self._source = source
        self._ranks = ranks

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._source.config.vocab_size

    def logits(self, token_ids: list[int]) -> Tensor:
        """float32 (tokens, vocabulary) on the CPU: row i predicts what follows token i."""
        size = self._source.tokens_per_block
        blocks = -(-len(token_ids) // size)
        if not 0 < blocks <= self._ranks.num_blocks:
            raise ForgeError(
                f"a sequence of {len(token_ids)} tokens cannot be computed",
                hint=f"Give 1 to {self._ranks.num_blocks * size} tokens.",
            )
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise ForgeError(
                f"token ids outside of the vocabulary of {self.vocab_size}", hint="Use the tokenizer of this model."
            )
        table = np.arange(blocks, dtype=np.int64).reshape(1, -1)
        before = torch.get_num_threads()
        torch.set_num_threads(self._ranks.threads)
        try:
            parts = []
            for start in range(0, len(token_ids), _TOKENS_AT_ONCE):
                tokens = np.array(token_ids[start : start + _TOKENS_AT_ONCE], dtype=np.int64)
                count = np.array([len(tokens)], dtype=np.int64)
                starts = np.array([start], dtype=np.int64)
                logits = self._ranks.execute(Step(starts, count, count, table, tokens, length=len(token_ids)))
                assert logits is not None, "rank 0 gives logits for every row wanted"
                parts.append(logits.cpu())
            return torch.cat(parts).clone()
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        """End the other ranks. May be called again."""
        self._ranks.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_runner(
    directory: Path,
    device: UsableDevice | None = None,
    compute_dtype: ModelDtype | None = None,
    *,
    max_tokens: int = 8192,
    threads: int | None = None,
) -> Runner:
    """Load a checkpoint (by the reference kernels; cpu and float32 unless told) or an engine (as it was compiled).

    `max_tokens`: longest sequence. Raises ForgeError.
    """
    source = open_model(directory, device, compute_dtype)
    size = source.tokens_per_block
    tokens = -(-min(max_tokens, source.limits.max_seq_len) // size) * size
    return Runner(source, RankGroup(source, threads=threads, memory=KvMemory(tokens=tokens)))
