"""Attention output from queries, keys and values: torch's fused operation, or explicitly with cap, ALiBi or sinks.

`group` query heads share one key and value head. Masks are additive, zero or minus infinity. `queries_at_once` bounds
the memory of a sequence's mask or scores; `needs_mask`: even a whole sequence needs a mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.decoder.alibi import Alibi

_HALVES = (torch.bfloat16, torch.float16)
_LARGEST, _FLASH_SM = 256, (8, 0)  # head size and compute capability of FlashAttention-2
_PLANNED = 512
"""On CUDA, cuDNN may compute whole sequences whose lengths are multiples of this. It plans each new length for 15 ms or
more, and is a little faster than the kernels that take any length."""


@dataclass(frozen=True)
class FusedScores:
    """torch's scaled dot product attention."""

    scale: float
    queries_at_once: int = 1024
    needs_mask: bool = False
    cap: None = None
    alibi: None = None
    sinks: None = None

    def one_query(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Queries (rows, kv_heads, group, size), one token a row; keys and values (rows, kv_heads, slots, size).

        A group is folded into the query dimension, so that keys are not repeated. A group of one is computed twice:
        torch multiplies one row of bfloat16 by a matrix six times as slowly as two (2.13, measured with AVX512-BF16).
        """
        if queries.shape[2] == 1 and queries.dtype is torch.bfloat16 and not queries.is_cuda:
            return self.one_query(queries.expand(-1, -1, 2, -1), keys, values, mask)[:, :, :1]
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)

    def sequence(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Queries (kv_heads x group, tokens, size), keys and values (kv_heads, keys, size); without mask, causal."""
        if not queries.is_cuda or (mask is None and queries.shape[1] % _PLANNED == 0):
            return self._sequence(queries, keys, values, mask)
        enabled = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            return self._sequence(queries, keys, values, mask)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(enabled)

    def _sequence(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        return functional.scaled_dot_product_attention(
            queries.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=len(queries) != len(keys),
        )[0]

    def takes_packed(self, queries: Tensor) -> bool:
        """Whether `packed` supports the queries' size and type, and their GPU."""
        size = queries.shape[-1]
        if not queries.is_cuda or queries.dtype not in _HALVES or size > _LARGEST or size % 8:
            return False
        has_it = torch.backends.cuda.is_flash_attention_available()
        return has_it and torch.cuda.get_device_capability(queries.device) >= _FLASH_SM

    def packed(self, queries: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """Whole sequences, one after the other, by one kernel (FlashAttention-2, Dao 2023).

        Queries (tokens, heads, size), keys and values (tokens, kv_heads, size) to (tokens, heads, size). Sequence i has
        the tokens from offsets[i] to offsets[i + 1], int32, at most `longest`.
        """
        found: Tensor = torch.ops.aten._flash_attention_forward(
            queries, keys, values, offsets, offsets, longest, longest, 0.0, True, False, scale=self.scale
        )[0]
        return found


@dataclass(frozen=True)
class SoftmaxScores:
    """float32 scores, capped at `cap` by tanh (Gemma 2) and biased by position (ALiBi) before the softmax.

    `sinks` (kv_heads, group, 1, 1), float32: an additional logit of each head in the softmax (GPT-OSS).
    """

    scale: float
    cap: float | None
    alibi: Alibi | None
    sinks: Tensor | None = None
    queries_at_once: int = 256
    needs_mask: bool = True

    def one_query(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """See `FusedScores.one_query`."""
        probabilities = self._probabilities(queries.unsqueeze(3), keys.unsqueeze(2), mask.unsqueeze(3))
        return (probabilities @ values.unsqueeze(2)).squeeze(3)

    def sequence(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """See `FusedScores.sequence`; a mask is required."""
        assert mask is not None, "these scores are masked by the caller"
        grouped = queries.unflatten(0, (len(keys), -1))
        probabilities = self._probabilities(grouped, keys.unsqueeze(1), mask)
        return (probabilities @ values.unsqueeze(1)).flatten(0, 1)

    def _probabilities(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """(..., kv_heads, group, queries, size) and (..., kv_heads, 1, keys, size) to (..., group, queries, keys)."""
        scores = (queries @ keys.transpose(-1, -2)).float().mul_(self.scale)
        if self.cap is not None:
            scores.div_(self.cap).tanh_().mul_(self.cap)
        if self.alibi is not None:
            bias = self.alibi.bias(keys.shape[-2])
            scores.add_(bias.view(queries.shape[-4], queries.shape[-3], 1, -1))
        scores.add_(mask)
        if self.sinks is None:
            return torch.softmax(scores, dim=-1).to(queries.dtype)
        largest = torch.maximum(scores.amax(dim=-1, keepdim=True), self.sinks)
        scores.sub_(largest).exp_()
        return scores.div_(scores.sum(dim=-1, keepdim=True) + (self.sinks - largest).exp_()).to(queries.dtype)


Scores = FusedScores | SoftmaxScores
"""An attention implementation."""
