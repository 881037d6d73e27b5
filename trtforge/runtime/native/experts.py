"""Mixture of experts by the kernels (source/experts.cpp): routing, and the experts' layers on their tokens."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native
from trtforge.runtime.native.recorder import Arena, NotRecordedError, recording
from trtforge.runtime.native.structures import Calls, Expert, Mixture, Routing, RowCounts

CAPACITY = 256
"""Rows that an expert computes at once: enough to reread its weights rarely, few enough to need little memory."""
Scoring = Literal["softmax", "sigmoid", "sigmoid_of_chosen"]
_SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sigmoid_of_chosen")


class Layer(Protocol):
    """The layers of one expert, from (rows, size) to (rows, size)."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Routes:
    """How tokens are routed to experts; the fields are those of `MoeSpec`."""

    num_experts: int
    top_k: int
    groups: int
    top_groups: int
    scoring: Scoring
    renormalize: bool
    scaling: float


@dataclass(frozen=True)
class _Recorded:
    """One expert's calls: they read `gathered` and write `computed`. `kept`: the memory of intermediate results."""

    calls: Calls
    row_counts: RowCounts
    kept: list[object]
    gathered: Tensor
    computed: Tensor


@dataclass(frozen=True)
class Experts:
    """The recorded calls of a rank's experts, which read `gathered` (CAPACITY, size).

    `kept`: keeps alive the calls and the memory that they read and write.
    """

    entries: "ctypes.Array[Expert]"
    gathered: Tensor
    kept: Sequence[object]

    @classmethod
    def recorded(cls, layers: Sequence[Layer], size: int, dtype: torch.dtype, arena: Arena) -> "Experts | None":
        """Record each expert's layers without computing them; None if they need more than kernel calls.

        All experts write their results to the same memory of `arena`, which the experts of other layers may use too.
        """
        found = _recorded(layers, size, dtype, arena)
        if found is not None and len({each.gathered.data_ptr() for each in found}) > 1:
            found = _recorded(layers, size, dtype, arena)  # the arena has grown, and therefore moved
        if found is None:
            return None
        experts = [
            Expert(
                calls=ctypes.addressof(each.calls),
                row_counts=ctypes.addressof(each.row_counts),
                count=len(each.calls),
                computed=each.computed.data_ptr(),
            )
            for each in found
        ]
        return cls((Expert * len(experts))(*experts), found[0].gathered, (layers, found))


def _recorded(layers: Sequence[Layer], size: int, dtype: torch.dtype, arena: Arena) -> list[_Recorded] | None:
    found = []
    for layer in layers:
        arena.restart()
        try:
            with recording(arena) as recorder:
                gathered = torch.empty(CAPACITY, size, dtype=dtype)
                computed = layer(gathered)
            calls, kept = recorder.calls()
            row_counts = recorder.row_counts(calls, CAPACITY, CAPACITY)
        except NotRecordedError:
            return None
        found.append(_Recorded(calls, row_counts, kept, gathered, computed))
    return found


def widened(kernels: Native, x: Tensor) -> Tensor:
    """x, of any shape, converted to float32."""
    if x.dtype is torch.float32:
        return x
    x = x.contiguous()
    y = x.new_empty(x.shape, dtype=torch.float32)
    kernels.run("widen", x.data_ptr(), y.data_ptr(), x.numel())
    return y


def gate_pairs(kernels: Native, pairs: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) x gate x sigmoid(alpha x gate), for (rows, 2 x size) with gate and up interleaved.

    First gate is clamped to at most `limit`, and up to [-limit, limit].
    """
    pairs = pairs.contiguous()
    rows, size = pairs.shape[0], pairs.shape[1] // 2
    y = pairs.new_empty(rows, size)
    kernels.run("gate_pairs", TYPES[pairs.dtype], pairs.data_ptr(), y.data_ptr(), rows, size, limit, alpha)
    return y


def scale_rows_by_gate(kernels: Native, y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y (rows, size) times sigmoid(x W^T), in place: x (rows, inputs), weight (1, inputs)."""
    x = x.contiguous()
    pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr())
    kernels.run("scale_rows_by_gate", TYPES[y.dtype], *pointers, len(x), x.shape[1], y.shape[1])
    return y


def route(kernels: Native, logits: Tensor, bias: Tensor | None, routes: Routes) -> tuple[Tensor, Tensor]:
    """float32 logits (tokens, experts) to the weights and int64 indices (tokens, top_k) of the selected experts."""
    rows = len(logits)
    weights = logits.new_empty(rows, routes.top_k)
    experts = logits.new_empty(rows, routes.top_k, dtype=torch.int64)
    given = Routing(
        logits=logits.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        weights=weights.data_ptr(),
        experts=experts.data_ptr(),
        rows=rows,
        num_experts=routes.num_experts,
        top_k=routes.top_k,
        groups=routes.groups,
        top_groups=routes.top_groups,
        scoring=_SCORINGS.index(routes.scoring),
        renormalize=routes.renormalize,
        scaling=routes.scaling,
    )
    kernels.run("route", given)
    return weights, experts


def mix(
    kernels: Native,
    x: Tensor,
    routed: tuple[Tensor, Tensor],
    experts: Experts,
    out: Tensor,
    *,
    first: int,
    accumulate: bool,
    on_inputs: bool,
) -> None:
    """Write the weighted sum of the experts' outputs to `out`, or with `accumulate` add it to `out`.

    x and out (tokens, size) must not overlap. `first`: index of the rank's first expert; `on_inputs`: weights multiply
    inputs instead of outputs.
    """
    x = x.contiguous()
    weights, chosen = routed
    given = Mixture(
        x=x.data_ptr(),
        weights=weights.data_ptr(),
        chosen=chosen.data_ptr(),
        experts=ctypes.addressof(experts.entries),
        gathered=experts.gathered.data_ptr(),
        out=out.data_ptr(),
        rows=x.shape[0],
        size=x.shape[1],
        top_k=chosen.shape[1],
        first=first,
        local=len(experts.entries),
        capacity=len(experts.gathered),
        on_inputs=on_inputs,
        accumulate=accumulate,
    )
    kernels.run("mix_experts", TYPES[x.dtype], given)
