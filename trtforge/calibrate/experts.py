"""Watches the experts of a mixture: the inputs of each expert's matrices, which `transformers` keeps in one tensor."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Seen = Callable[[int, Tensor, Tensor], None]
"""Told of every expert that tokens reach: its number, its inputs (tokens, hidden), those of its down projection."""


def watch_experts(experts: nn.Module, seen: Seen) -> Callable[[], None]:
    """Replace the forward pass of `experts` by one that computes the same and tells `seen`; call the result to undo."""

    def forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`chosen` and `weights` (tokens, top_k): which experts, and how much of each."""
        result = torch.zeros_like(hidden)
        gate_up, down = self.gate_up_proj, self.down_proj
        for expert in chosen.unique().tolist():
            if expert >= len(gate_up):  # what some implementations mark tokens with that go nowhere
                continue
            tokens, place = torch.where(chosen == expert)
            inputs = hidden[tokens]
            gate, up = functional.linear(inputs, gate_up[expert]).chunk(2, dim=-1)
            inner = self.act_fn(gate) * up
            seen(expert, inputs, inner)
            output = functional.linear(inner, down[expert]) * weights[tokens, place, None]
            result.index_add_(0, tokens, output.to(result.dtype))
        return result

    setattr(experts, "forward", MethodType(forward, experts))  # noqa: B010

    def undo() -> None:
        del experts.forward

    return undo
