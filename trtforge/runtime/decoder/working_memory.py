"""The GPU memory that the steps of a rank take beside its weights and its KV cache."""

import torch

from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.padding import padded_rows
from trtforge.runtime.decoder.recorded import MOST_ROWS
from trtforge.runtime.scheduling.batch_limits import BatchLimits


def step_bytes(spec: DecoderSpec, dtype: torch.dtype, limits: BatchLimits) -> int:
    """Approximate bytes of the largest step: the intermediate results of one layer, and the logits.

    Of each token, a layer keeps its input and the residual, and the larger of two: queries, keys, values and the
    output of attention; or gate, up and their product in the MLP (of each chosen expert, with its copy of the input).
    """
    attention = spec.qkv_rows + spec.num_heads * spec.head_size
    mlp = 3 * spec.intermediate_size
    if spec.moe is not None:
        mlp = spec.moe.top_k * (spec.hidden_size + 3 * spec.moe.expert_size) + 3 * spec.moe.shared_size
    numbers = limits.max_num_tokens * (2 * spec.hidden_size + max(attention, mlp))
    logits = limits.max_batch_size * spec.vocab_size * torch.float32.itemsize if spec.last else 0
    return numbers * dtype.itemsize + logits


def graph_logits_bytes(spec: DecoderSpec, limits: BatchLimits) -> int:
    """Bytes of the logits of all graphs of single-token rows: each number of rows has a graph with its own."""
    if not spec.last:
        return 0
    most = min(limits.max_batch_size, MOST_ROWS)
    return sum({padded_rows(rows) for rows in range(1, most + 1)}) * spec.vocab_share * torch.float32.itemsize
