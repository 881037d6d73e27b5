"""Mixtures of experts by the kernels (source/experts.cpp): routing, and the experts' layers on the tokens they got."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native
from trtforge.runtime.native.recorder import Arena, recording
from trtforge.runtime.native.structures import OF_ROWS, RECORDED, Call, Calls, Mixture, Routing

CAPACITY = 256
"""Rows that an expert computes at once: enough to read its weights seldom, and little memory."""
Scoring = Literal["softmax", "sigmoid", "sigmoid_of_chosen"]
_SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sigmoid_of_chosen")


class Layer(Protocol):
    """Layers of one expert, (rows, size) to (rows, size)."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Routes:
    """Which experts a token goes to; the meaning of the fields is that of `MoeSpec`."""

    count: int
    chosen: int
    groups: int
    top_groups: int
    scoring: Scoring
    renormalize: bool
    scaling: float


@dataclass(frozen=True)
class Experts:
    """The recorded calls of a rank's experts, which read `taken` and write `made`, both (CAPACITY, size).

    `ends` (experts,): int64 ends of each expert's calls. `kept`: what has the memory that the calls read and write.
    """

    calls: Calls
    ends: Tensor
    taken: Tensor
    made: Tensor
    kept: Sequence[object]

    @classmethod
    def recorded(cls, layers: Sequence[Layer], size: int, dtype: torch.dtype, arena: Arena) -> "Experts | None":
        """The calls of each expert's layers; None if kernels do not compute all of them. Nothing is computed.

        All have their results in the same memory of `arena`, which other experts may use too.
        """
        found = []
        for layer in (layers[0], *layers):  # the first one twice: an arena that grows has the results before elsewhere
            calls = _record(layer, size, dtype, arena)
            if calls is None:
                return None
            found.append(calls)
        known = found[1:]
        _, _, taken, made = known[0]
        assert {(each[2].data_ptr(), each[3].data_ptr()) for each in known} == {(taken.data_ptr(), made.data_ptr())}
        together = [call for own, *_ in known for call in own]
        table = (Call * len(together))(*together)
        ends = torch.tensor(list(accumulate(len(own) for own, *_ in known)))
        return cls(table, ends, taken, made, (layers, *(kept for _, kept, *_ in known)))


def _record(
    layer: Layer, size: int, dtype: torch.dtype, arena: Arena
) -> tuple[Calls, list[object], Tensor, Tensor] | None:
    arena.restart()
    with recording(arena, computes=False) as recorder:
        taken = torch.empty(CAPACITY, size, dtype=dtype)
        made = layer(taken)
    calls, kept = recorder.calls()
    if not recorder.complete or not {RECORDED[call.kernel] for call in calls} <= OF_ROWS:
        return None
    return calls, kept, taken, made


def widened(kernels: Native, x: Tensor) -> Tensor:
    """x, of any shape, in float32."""
    if x.dtype is torch.float32:
        return x
    x = x.contiguous()
    y = x.new_empty(x.shape, dtype=torch.float32)
    kernels.run("widen", x.data_ptr(), y.data_ptr(), x.numel())
    return y


def gate_pairs(kernels: Native, pairs: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) x gate x sigmoid(alpha x gate), of (rows, 2 x size) with gate and up in turn, both cut at `limit`."""
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
    """float32 logits (tokens, experts) to the weights and int64 indices (tokens, chosen) of the selected experts."""
    rows = len(logits)
    weights = logits.new_empty(rows, routes.chosen)
    experts = logits.new_empty(rows, routes.chosen, dtype=torch.int64)
    given = Routing(
        logits=logits.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        weights=weights.data_ptr(),
        experts=experts.data_ptr(),
        rows=rows,
        count=routes.count,
        chosen=routes.chosen,
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
    fresh: bool,
    on_inputs: bool,
) -> None:
    """Add the weighted outputs of the experts to `out`, which holds nothing yet if `fresh`; x and out (tokens, size).

    `first`: index of the rank's first expert; `on_inputs`: weights multiply inputs instead of outputs.
    """
    x = x.contiguous()
    weights, chosen = routed
    given = Mixture(
        x=x.data_ptr(),
        weights=weights.data_ptr(),
        experts=chosen.data_ptr(),
        calls=ctypes.addressof(experts.calls),
        ends=experts.ends.data_ptr(),
        taken=experts.taken.data_ptr(),
        made=experts.made.data_ptr(),
        out=out.data_ptr(),
        rows=x.shape[0],
        size=x.shape[1],
        chosen=chosen.shape[1],
        first=first,
        local=len(experts.ends),
        capacity=len(experts.taken),
        on_inputs=on_inputs,
        fresh=fresh,
    )
    kernels.run("mix_experts", TYPES[x.dtype], given)
