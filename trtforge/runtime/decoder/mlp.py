"""The dense MLPs: plain, and gated in the two ways that TensorRT-LLM stores them."""

import torch
from torch import Tensor

from trtforge.runtime.architecture.activations import NATIVE_ACTIVATIONS, Activation, activation_of
from trtforge.runtime.cuda.fused import step_kernels_for
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.linears.linear import Linear, Placement
from trtforge.runtime.native.activations import activate
from trtforge.runtime.native.bindings import native_for

_CHUNK = 1024
"""Tokens whose hidden states a CPU computes together."""


def load_mlp(loader: Loader, name: str) -> Linear:
    """The MLP of a layer; its output is summed over ranks."""
    mlp = _load_mlp(loader, name)
    chunked = loader.place.device.type == "cpu" and loader.adapters is None  # adapters know the tokens of whole steps
    return (lambda x: in_chunks(mlp, x, _CHUNK)) if chunked else mlp


def in_chunks(function: Linear, x: Tensor, most: int) -> Tensor:
    """function(x), of at most so many rows at once, so that what it computes between takes little memory."""
    if len(x) <= most:
        return function(x)
    return torch.cat([function(chunk) for chunk in x.tensor_split(-(-len(x) // most))])


def _load_mlp(loader: Loader, name: str) -> Linear:
    network = loader.spec.network
    act = activation_of(loader.spec.hidden_act, exact_gelu=network.exact_gelu)
    proj = loader.row_parallel(f"{name}.proj", bias_in_parts=network.proj_bias_in_parts)
    match network.mlp:
        case "gated":
            # TensorRT-LLM's `fc` is what Hugging Face calls gate_proj, its `gate` is up_proj.
            fc_gate = gated_halves(loader.place, loader.pair(f"{name}.fc", f"{name}.gate"), act, activated=0)
            return lambda x: proj(fc_gate(x))
        case "up_gate":
            up_gate = gated_halves(loader.place, loader.linear(f"{name}.fc"), act)
            return lambda x: proj(up_gate(x))
        case "plain":
            fc = loader.linear(f"{name}.fc")
            own = _activation(loader.place, act)
            return lambda x: proj(own(fc(x)))


def _activation(place: Placement, act: Activation) -> Activation:
    """The activation, by a kernel if there is one."""
    name, kernels = NATIVE_ACTIVATIONS.get(act), native_for(place.device, place.dtype)
    return act if name is None or kernels is None else lambda x: activate(kernels, x, name)


def gated_halves(place: Placement, both: Linear, act: Activation, activated: int = 1) -> Linear:
    """act(one half) * other half, where one layer computes both. `activated`: index of the half that is activated."""
    name, kernels = NATIVE_ACTIVATIONS.get(act), step_kernels_for(place.device, place.dtype)

    def inner(x: Tensor) -> Tensor:
        halves = both(x)
        if name and kernels is not None:
            return kernels.gate(halves, name, activated)
        parts = halves.chunk(2, dim=-1)
        return act(parts[activated]).mul_(parts[1 - activated])

    return inner
