"""From hidden states to logits: final norm, a rank's columns of the LM head, scaling and capping of the whole."""

from collections.abc import Callable

import torch
from torch import Tensor

from trtforge.runtime.architecture.layout import FINAL_NORM, LM_HEAD
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.loader import Loader


def load_logits(loader: Loader) -> Callable[[Tensor], Tensor]:
    """A function from (rows, hidden) to this rank's columns of their logits."""
    norm = loader.norm(FINAL_NORM) if loader.spec.final_norm else None
    linear = loader.linear(LM_HEAD)
    return lambda hidden: linear(hidden if norm is None else norm(hidden))


def finished_logits(columns: Tensor, spec: DecoderSpec) -> Tensor:
    """float32 (rows, vocabulary) logits from all ranks' columns: padding removed, scaled and capped."""
    logits = columns[:, : spec.vocab_size].float()
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    return logits if spec.logit_cap is None else spec.logit_cap * torch.tanh(logits / spec.logit_cap)
