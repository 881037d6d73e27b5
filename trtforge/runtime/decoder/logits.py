"""From hidden states to logits: the final norm, the output head's columns of a rank, what the whole goes through."""

from collections.abc import Callable

import torch
from torch import Tensor

from trtforge.runtime.architecture.layout import FINAL_NORM, LM_HEAD
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.loader import Loader


def load_logits(loader: Loader) -> Callable[[Tensor], Tensor]:
    """The function of (rows, hidden) that gives this rank's columns of their logits."""
    norm = loader.norm(FINAL_NORM) if loader.spec.final_norm else None
    linear = loader.linear(LM_HEAD)
    return lambda hidden: linear(hidden if norm is None else norm(hidden))


def finished_logits(columns: Tensor, spec: DecoderSpec) -> Tensor:
    """float32 (rows, vocabulary) of all ranks' columns: without padding, scaled and capped as the model says."""
    logits = columns[:, : spec.vocab_size].float()
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    return logits if spec.logit_cap is None else spec.logit_cap * torch.tanh(logits / spec.logit_cap)
