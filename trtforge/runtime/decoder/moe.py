"""Mixture of experts: the router selects experts, each rank computes its own, and the outputs are summed over ranks.

Numerics: transformers' mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3, llama4 and gpt_oss;
layout: tensorrt_llm/layers/moe.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.architecture.activations import activation_of
from trtforge.runtime.architecture.spec_parts import Clamp, MoeSpec
from trtforge.runtime.decoder.collective import Collective
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.mlp import gated_halves
from trtforge.runtime.linears.linear import Linear, Placement
from trtforge.runtime.native.bindings import Native, native_for
from trtforge.runtime.native.experts import Experts, Routes, gate_pairs, mix, scale_rows_by_gate, widened
from trtforge.runtime.native.experts import route as native_route
from trtforge.runtime.native.float32 import linear
from trtforge.runtime.native.tiles import pack_float32


def load_moe(loader: Loader, name: str) -> Linear:
    """The experts of a layer, and the shared expert if it has one."""
    moe = loader.spec.moe
    assert moe is not None, "a layer with a router in a model without experts"
    router = _Router(
        loader.tensor(f"{name}.router.weight"),
        loader.tensor(f"{name}.router.bias").float() if moe.biased else None,
        loader.tensor(f"{name}.e_score_correction_bias").float() if moe.sigmoid else None,
    )
    ups, downs = _gated_experts(loader, moe, f"{name}.fc"), loader.experts(f"{name}.proj")
    experts = [_expert(up, down) for up, down in zip(ups, downs, strict=True)]
    shared = _shared(loader, f"{name}.shared_expert") if moe.shared_size else None
    kernels = native_for(loader.place.device, loader.place.dtype)
    if kernels is not None:
        recorded = Experts.recorded(experts, loader.spec.hidden_size, loader.place.dtype, loader.arena)
        if recorded is not None:
            return _by_kernels(kernels, moe, router, recorded, shared, loader.ranks)
    return _by_torch(moe, router, experts, shared, loader.ranks)


@dataclass(frozen=True)
class _Router:
    """float32 `weight` (experts, hidden), `bias` (experts,) of the logits, and `correction` (experts,), added to the
    scores that select experts."""

    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None


def _by_torch(moe: MoeSpec, router: _Router, experts: list[Linear], shared: Linear | None, ranks: Collective) -> Linear:
    def mixture(x: Tensor) -> Tensor:
        weights, chosen = route(moe, functional.linear(x.float(), router.weight, router.bias), router.correction)
        out = shared(x) if shared else torch.zeros_like(x)
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=moe.num_experts).tolist()
        by_expert = order.split(counts)[moe.first : moe.first + moe.local]
        for own, expert in zip(by_expert, experts, strict=True):
            if len(own):
                tokens = own // moe.top_k
                taken, weight = x.index_select(0, tokens), weights.flatten()[own].to(x.dtype).unsqueeze(1)
                out.index_add_(0, tokens, expert(taken * weight) if moe.on_inputs else expert(taken) * weight)
        return ranks.all_reduce(out)

    return mixture


def _by_kernels(
    kernels: Native, moe: MoeSpec, router: _Router, experts: Experts, shared: Linear | None, ranks: Collective
) -> Linear:
    weight, routes = pack_float32(router.weight), routes_of(moe)
    bias, correction = router.bias, router.correction  # not `router`, whose unpacked weight can be freed

    def mixture(x: Tensor) -> Tensor:
        logits = linear(kernels, widened(kernels, x), weight, bias, moe.num_experts)
        routed = native_route(kernels, logits, correction, routes)
        out = shared(x) if shared else torch.empty_like(x)
        mix(kernels, x, routed, experts, out, first=moe.first, accumulate=shared is not None, on_inputs=moe.on_inputs)
        return ranks.all_reduce(out)

    return mixture


def routes_of(moe: MoeSpec) -> Routes:
    """The settings of `route`, for the kernel."""
    common = Routes(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        groups=moe.groups,
        top_groups=moe.top_groups,
        scoring="sigmoid" if moe.sigmoid else "softmax",
        renormalize=moe.renormalize,
        scaling=moe.scaling,
    )
    return replace(common, scoring="sigmoid_of_chosen", renormalize=False, scaling=1.0) if moe.on_inputs else common


def _expert(up: Linear, down: Linear) -> Linear:
    return lambda x: down(up(x))


def _gated_experts(loader: Loader, moe: MoeSpec, name: str) -> list[Linear]:
    """The gate and up projection of each expert, followed by the gating."""
    act = activation_of(loader.spec.hidden_act, exact_gelu=loader.spec.network.exact_gelu)
    clamp = moe.clamp
    if clamp is None:
        return [gated_halves(loader.place, fc, act) for fc in loader.experts(name)]
    return [_clamped_pairs(loader.place, fc, clamp) for fc in loader.experts(name)]


def _clamped_pairs(place: Placement, both: Linear, clamp: Clamp) -> Linear:
    """A layer whose outputs alternate between gate and up projection, followed by the clamped gating."""
    kernels = native_for(place.device, place.dtype)

    def inner(x: Tensor) -> Tensor:
        pairs = both(x)
        if kernels is not None:
            return gate_pairs(kernels, pairs, clamp.limit, clamp.alpha)
        gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        gated: Tensor = (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))
        return gated

    return inner


def route(moe: MoeSpec, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(tokens, experts) router logits to the (tokens, top_k) weights and indices of the selected experts.

    `bias` (experts): added to the sigmoid scores that select experts, not to the weights.
    """
    if bias is not None:
        return _route_by_sigmoids(moe, logits.sigmoid(), bias)
    if moe.on_inputs:
        best_logits, chosen = logits.topk(moe.top_k, dim=1)
        return best_logits.sigmoid(), chosen
    scores = logits.softmax(dim=-1)
    if moe.groups > 1:
        by_group = scores.unflatten(1, (moe.groups, -1))
        best = by_group.amax(dim=2).topk(moe.top_groups, dim=1, sorted=False).indices
        candidates = torch.zeros(len(scores), moe.groups, dtype=torch.bool, device=scores.device).scatter_(
            1, best, True
        )
        scores = by_group.masked_fill(~candidates.unsqueeze(2), 0.0).flatten(1)
    weights, chosen = scores.topk(moe.top_k, dim=1)
    if moe.renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights * moe.scaling, chosen


def _route_by_sigmoids(moe: MoeSpec, scores: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    ranked = scores + bias
    by_group = ranked.unflatten(1, (moe.groups, -1))
    best = by_group.topk(2, dim=2).values.sum(dim=2).topk(moe.top_groups, dim=1, sorted=False).indices
    candidates = torch.zeros(len(scores), moe.groups, dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    ranked = by_group.masked_fill(~candidates.unsqueeze(2), -torch.inf).flatten(1)
    chosen = ranked.topk(moe.top_k, dim=1).indices
    weights = scores.gather(1, chosen)
    if moe.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return weights * moe.scaling, chosen


def _shared(loader: Loader, name: str) -> Linear:
    """The shared expert: this rank's part of the sum."""
    spec = loader.spec
    act = activation_of(spec.hidden_act, exact_gelu=spec.network.exact_gelu)
    up = gated_halves(loader.place, loader.linear(f"{name}.fc"), act)
    down = loader.linear(f"{name}.proj")
    if not spec.network.shared_expert_gate:
        return lambda x: down(up(x))
    gate = loader.tensor(f"{name}_gate.weight")
    kernels = native_for(loader.place.device, loader.place.dtype)
    if kernels is not None:
        return lambda x: scale_rows_by_gate(kernels, down(up(x)), x, gate)
    return lambda x: down(up(x)).mul_(functional.linear(x, gate).sigmoid())
