"""From hidden states to logits: final norm, a rank's columns of the LM head, scaling and capping of all columns."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtforge.models.kernels import screen_bytes
from trtforge.runtime.architecture.layout import FINAL_NORM, LM_HEAD
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.cuda.fused import fused_for
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.linears.linear import GpuMatrix, Linear, NativeMatrix
from trtforge.runtime.native.screened import Screened

_DISTINCT = 3.0
"""Up to this multiple of the cap, unequal logits stay unequal when capped; of equal ones the first token is chosen."""


class Head:
    """From (rows, hidden) to this rank's columns of their logits; in float32 on a GPU without other ranks."""

    def __init__(self, loader: Loader) -> None:
        self._norm = loader.norm(FINAL_NORM) if loader.spec.final_norm else None
        self.linear = linear = loader.linear(LM_HEAD)
        self._spec = loader.spec
        alone = loader.spec.tp == 1 and loader.spec.pp == 1
        self._screened = _screened(linear, loader.spec)
        self._multiply = self._screened or (linear.unrounded if alone and isinstance(linear, GpuMatrix) else linear)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._multiply(self.normed(hidden))

    def need(self, candidates: int, draws: npt.NDArray[np.int64]) -> None:
        """Set `Step.candidates` and `Step.draws` for the next logits. Logits of tokens that cannot be chosen may be
        wrong, as long as they stay unchosen. Recorded steps follow it."""
        if self._screened is None:
            return
        if not len(draws) or self._spec.logit_cap is not None:
            self._screened.need(0 if len(draws) else candidates)
            return
        keys, temperatures, below = (np.ascontiguousarray(each) for each in draws.reshape(-1, 3).T)
        divisors, scale = temperatures.view(np.float64), self._spec.logit_scale
        factors = np.divide(scale, divisors, out=np.zeros_like(divisors), where=divisors > 0.0)
        self._screened.need(candidates, keys.view(np.uint64), factors, below.view(np.float64) / scale)

    def normed(self, hidden: Tensor) -> Tensor:
        """The input of the LM head."""
        return hidden if self._norm is None else self._norm(hidden)


def _screened(linear: Linear, spec: DecoderSpec) -> Screened | None:
    """An LM head that screens tokens on the CPU. None without kernels, for a small LM head, or for a scale that is not
    positive."""
    if not isinstance(linear, NativeMatrix) or spec.logit_scale <= 0.0:
        return None
    if not screen_bytes(spec.vocab_share, spec.hidden_size):
        return None
    first = spec.rank.tp_rank * spec.vocab_share
    known = max(0, spec.vocab_size - first)  # the last rank may have fewer than vocab_share
    by_products, layer = linear.by_products, linear.layer
    farthest = math.inf if spec.logit_cap is None else _DISTINCT * spec.logit_cap / spec.logit_scale
    return Screened(
        linear.kernels,
        layer,
        spec.hidden_size,
        by_products=by_products,
        valid=known,
        first=first,
        farthest=farthest,
    )


def finished_logits(columns: Tensor, spec: DecoderSpec) -> Tensor:
    """float32 (rows, vocabulary) logits from all ranks' columns: padding removed, scaled and capped."""
    logits = columns if columns.shape[1] == spec.vocab_size else columns[:, : spec.vocab_size]
    logits = logits.float()
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    return logits if spec.logit_cap is None else spec.logit_cap * torch.tanh(logits / spec.logit_cap)


def most_likely(logits: Tensor) -> Tensor:
    """The first argmax of each row. On the CPU, numpy's vectorised argmax is twenty times as fast as torch's."""
    return torch.as_tensor(_argmax_where_fast(logits))


def most_likely_few(logits: Tensor, count: int) -> Tensor:
    """int64 (rows, count): the tokens of the `count` largest logits of each row, the largest first."""
    return most_likely(logits).unsqueeze(1) if count == 1 else logits.topk(count).indices


def most_likely_tokens(logits: Tensor) -> list[int]:
    """`most_likely` as a list; on the CPU without torch, whose code is no longer in the processor's caches when a step
    ends."""
    tokens: list[int] = _argmax_where_fast(logits).tolist()
    return tokens


def _argmax_where_fast(logits: Tensor) -> Any:
    """The first argmax of each row: by a kernel or torch on a GPU, by numpy on the CPU."""
    if not logits.is_cuda:
        return logits.numpy().argmax(1)
    kernels = fused_for(logits.device, logits.dtype)
    return logits.argmax(1) if kernels is None else kernels.argmax(logits)
