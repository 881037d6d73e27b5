"""Mixture of experts: the router selects experts, each rank computes its own, and the outputs are summed over ranks.

Numerics: transformers' mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3, llama4 and gpt_oss;
layout: tensorrt_llm/layers/moe.py.
"""

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.architecture.activations import activation_of
from trtforge.runtime.architecture.spec_parts import Clamp, MoeSpec
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.mlp import gated_halves
from trtforge.runtime.linears.linear import Linear


def load_moe(loader: Loader, name: str) -> Linear:
    """The experts of a layer, and the shared expert if it has one."""
    spec, ranks = loader.spec, loader.ranks
    moe = spec.moe
    assert moe is not None, "a layer with a router in a model without experts"
    act = activation_of(spec.hidden_act, exact_gelu=spec.network.exact_gelu)
    router = loader.tensor(f"{name}.router.weight")
    bias = loader.tensor(f"{name}.e_score_correction_bias") if moe.sigmoid else None
    router_bias = loader.tensor(f"{name}.router.bias").float() if moe.biased else None
    clamp = moe.clamp
    ups = [
        gated_halves(loader.place, fc, act) if clamp is None else _clamped_pairs(fc, clamp)
        for fc in loader.experts(f"{name}.fc")
    ]
    downs = loader.experts(f"{name}.proj")
    shared = _shared(loader, f"{name}.shared_expert") if moe.shared_size else None

    def mixture(x: Tensor) -> Tensor:
        weights, chosen = route(moe, functional.linear(x.float(), router, router_bias), bias)
        out = shared(x) if shared else torch.zeros_like(x)
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=moe.num_experts).tolist()
        by_expert = order.split(counts)[moe.first : moe.first + moe.local]
        for own, up, down in zip(by_expert, ups, downs, strict=True):
            if len(own):
                tokens = own // moe.top_k
                taken, weight = x.index_select(0, tokens), weights.flatten()[own].to(x.dtype).unsqueeze(1)
                found = down(up(taken * weight)) if moe.on_inputs else down(up(taken)) * weight
                out.index_add_(0, tokens, found)
        return ranks.all_reduce(out)

    return mixture


def _clamped_pairs(both: Linear, clamp: Clamp) -> Linear:
    """Gate and up projection by one layer whose outputs are gate and up in turn."""

    def inner(x: Tensor) -> Tensor:
        gate, up = both(x).unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        gated: Tensor = (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))
        return gated

    return inner


def route(moe: MoeSpec, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(tokens, experts) router logits to the (tokens, top_k) weights and indices of the selected experts.

    `bias` (experts): added to sigmoid scores for the choice, not to the weights.
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
    return lambda x: down(up(x)).mul_(functional.linear(x, gate).sigmoid())
