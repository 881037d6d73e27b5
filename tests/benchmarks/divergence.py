"""Perplexity and KL divergence of a model of `transformers`, for peers in environments of their own too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peer:
    """Relative increase of perplexity over float32, and mean KL divergence from it in nats."""

    increase: float
    kl: float


def compared(model: torch.nn.Module, reference: torch.nn.Module, windows: Sequence[Sequence[int]]) -> Peer:
    """Perplexity over the next tokens and KL divergence at every token, as `verify` measures them."""
    loss = divergence = 0.0
    for window in windows:
        ids = torch.tensor(window)
        theirs, wanted = (each(ids.unsqueeze(0)).logits[0].float().log_softmax(-1) for each in (model, reference))
        loss += float((wanted - theirs)[:-1].gather(1, ids[1:, None]).sum())
        divergence += float(torch.nn.functional.kl_div(theirs, wanted, reduction="sum", log_target=True))
    tokens, predicted = sum(map(len, windows)), sum(len(window) - 1 for window in windows)
    return Peer(math.exp(loss / predicted) - 1, divergence / tokens)
