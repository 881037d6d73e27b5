"""Skips tokens in Llama 4's experts in `transformers`, which compute all tokens, with zeros for those not routed to
them.

The outputs are the same, with 1 / experts of the time and memory.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

Seen = Callable[[int, Tensor, Tensor], None]
"""Called for every expert that has tokens: its index, its inputs (tokens, hidden), its down projection's inputs."""


def compute_chosen(experts: nn.Module, seen: Seen | None = None) -> None:
    """Replace the forward pass of a `Llama4TextExperts` by an equal one, which also calls `seen`."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        """(experts x tokens, hidden): the tokens times their scores, zeros where an expert is not chosen."""
        states = hidden.view(len(self.gate_up_proj), -1, self.hidden_size)
        result = torch.zeros_like(states)
        for expert, own in enumerate(states):
            tokens = own.any(dim=1).nonzero().flatten()
            if len(tokens) == 0:
                continue
            inputs = own[tokens]
            gate, up = (inputs @ self.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = up * self.act_fn(gate)
            if seen is not None:
                seen(expert, inputs, inner)
            result[expert, tokens] = inner @ self.down_proj[expert]
        return result.view(-1, self.hidden_size)

    setattr(experts, "forward", MethodType(forward, experts))  # noqa: B010
