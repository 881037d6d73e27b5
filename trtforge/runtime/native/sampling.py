"""Sampling of tokens, and log-sum-exp of logits, by the kernels (source/sampling.cpp)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.structures import Draws


@dataclass(frozen=True)
class Limits:
    """The sampling limits of each token to draw. top_p applies to the tokens that min_p and top_k keep.

    top_k: at most the vocabulary size, which keeps all; top_p: in (0, 1], 1 keeps all; min_p: in [0, 1], 0 keeps all;
    None is 0 for every token to draw.
    """

    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float] | None = None


def draw_tokens(kernels: Native, logits: Tensor, places: Sequence[int], limits: Limits, keys: Tensor) -> Tensor:
    """Sample a token within its limits for each of `places`, which are rows of the float32 logits; see `Sampler`.

    keys: int64 (tokens,), 64 random bits each. Returns int64 (tokens,); 0 where no token is possible.
    """
    tokens = torch.empty(len(places), dtype=torch.int64)
    _run(kernels, logits, places, limits, keys, tokens, None)
    return tokens


def kept_weights(kernels: Native, logits: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """The weights (vocabulary,) with which `draw_tokens` samples from logits (vocabulary,); 0 for excluded tokens."""
    weights = torch.empty_like(logits)
    key, token = torch.zeros(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    _run(kernels, logits.unsqueeze(0), [0], Limits([top_k], [top_p], [min_p]), key, token, weights)
    return weights


def log_sums(kernels: Native, logits: Tensor) -> Tensor:
    """log(sum of exp(logit)) of each row of float32 logits (rows, vocabulary), without a copy of all of them."""
    sums = logits.new_empty(len(logits))
    kernels.run("log_sums", logits.data_ptr(), sums.data_ptr(), *logits.shape, logits.stride(0))
    return sums


def _run(
    kernels: Native,
    logits: Tensor,
    places: Sequence[int],
    limits: Limits,
    keys: Tensor,
    tokens: Tensor,
    weights: Tensor | None,
) -> None:
    rows, top_k = (torch.tensor(numbers, dtype=torch.int64) for numbers in (places, limits.top_k))
    top_p = torch.tensor(limits.top_p, dtype=torch.float64)
    min_p = None if limits.min_p is None else torch.tensor(limits.min_p, dtype=torch.float32)
    given = Draws(
        logits=logits.data_ptr(),
        places=rows.data_ptr(),
        top_k=top_k.data_ptr(),
        top_p=top_p.data_ptr(),
        min_p=None if min_p is None else min_p.data_ptr(),
        keys=keys.data_ptr(),
        tokens=tokens.data_ptr(),
        weights=None if weights is None else weights.data_ptr(),
        rows=len(places),
        vocabulary=logits.shape[1],
        stride=logits.stride(0),
    )
    kernels.run("draw_tokens", given)
