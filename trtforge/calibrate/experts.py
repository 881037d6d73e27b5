"""Observes the inputs of each expert's matrices in a mixture of experts, which `transformers` stacks in one tensor."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trtforge.reference.chosen import Seen, compute_chosen


def watch_experts(experts: nn.Module, seen: Seen) -> Callable[[], None]:
    """Replace the forward pass of `experts` by an equal one that also calls `seen`; returns a function to undo it."""
    return _replaced(experts, _routed(seen))


def watch_stacked_experts(experts: nn.Module, seen: Seen) -> Callable[[], None]:
    """`watch_experts` for Llama 4: each expert gets all tokens scaled by their scores, zero for tokens of others."""
    compute_chosen(experts, seen)
    return lambda: compute_chosen(experts)


def watch_biased_experts(experts: nn.Module, seen: Seen) -> Callable[[], None]:
    """`watch_experts` for GPT-OSS, whose experts are stacked and have biases and their own gate function."""

    def forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Like the function that `_routed` returns."""
        result = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            tokens, slot = torch.where(chosen == expert)
            inputs = hidden[tokens]
            inner = self._apply_gate(inputs @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert])
            seen(expert, inputs, inner)
            output = (inner @ self.down_proj[expert] + self.down_proj_bias[expert]) * weights[tokens, slot, None]
            result.index_add_(0, tokens, output.to(result.dtype))
        return result

    return _replaced(experts, forward)


def _replaced(experts: nn.Module, forward: Callable[..., Tensor]) -> Callable[[], None]:
    """Replace the forward pass of `experts`; returns a function to undo it."""
    setattr(experts, "forward", MethodType(forward, experts))  # noqa: B010

    def undo() -> None:
        del experts.forward

    return undo


def _routed(seen: Seen) -> Callable[..., Tensor]:
    """The forward pass of experts that get their tokens by index."""

    def forward(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`chosen` and `weights` (tokens, top_k): expert indices and routing weights."""
        result = torch.zeros_like(hidden)
        gate_up, down = self.gate_up_proj, self.down_proj
        for expert in chosen.unique().tolist():
            if expert >= len(gate_up):  # some implementations mark unrouted tokens this way
                continue
            tokens, slot = torch.where(chosen == expert)
            inputs = hidden[tokens]
            gate, up = functional.linear(inputs, gate_up[expert]).chunk(2, dim=-1)
            inner = self.act_fn(gate) * up
            seen(expert, inputs, inner)
            output = functional.linear(inner, down[expert]) * weights[tokens, slot, None]
            result.index_add_(0, tokens, output.to(result.dtype))
        return result

    return forward
