"""The dense MLPs: plain, and gated in the two ways that TensorRT-LLM stores them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.runtime.architecture.activations import NATIVE_ACTIVATIONS, Activation, activation_of
from trtforge.runtime.cuda.fused import FusedKernels, StepKernels, step_kernels_for
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.linears.linear import Linear, Placement, input_scale
from trtforge.runtime.native.activations import activate
from trtforge.runtime.native.bindings import native_for

_CHUNK = 1024
"""Maximum tokens that the MLP computes at once on a CPU."""


def load_mlp(loader: Loader, name: str) -> Linear:
    """The MLP of a layer; its output is summed over ranks."""
    mlp = _load_mlp(loader, name)
    chunked = loader.place.device.type == "cpu" and loader.adapters is None  # adapters expect all tokens of a step
    return (lambda x: in_chunks(mlp, x, _CHUNK)) if chunked else mlp


def in_chunks(function: Linear, x: Tensor, most: int) -> Tensor:
    """function(x), computed for at most `most` rows at a time to bound the memory of intermediate results."""
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
            both = loader.pair(f"{name}.fc", f"{name}.gate")
            return _Mlp(gated_halves(loader.place, both, act, activated=0, code_scale=input_scale(proj)), proj)
        case "up_gate":
            both = loader.linear(f"{name}.fc")
            return _Mlp(gated_halves(loader.place, both, act, code_scale=input_scale(proj)), proj)
        case "plain":
            fc = loader.linear(f"{name}.fc")
            own = _activation(loader.place, act)
            return lambda x: proj(own(fc(x)))


@dataclass(frozen=True)
class _Mlp:
    """`proj` applied to the output of `inner`."""

    inner: Linear
    proj: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.proj(self.inner(x))

    @property
    def input_scale(self) -> Tensor | None:
        """See `linear.input_scale`."""
        return input_scale(self.inner)


def _activation(place: Placement, act: Activation) -> Activation:
    """The activation, by a kernel if there is one."""
    name, kernels = NATIVE_ACTIVATIONS.get(act), native_for(place.device, place.dtype)
    return act if name is None or kernels is None else lambda x: activate(kernels, x, name)


@dataclass(frozen=True)
class _GatedHalves:
    """See `gated_halves`. `name`: the activation's name in the kernels; None if they lack it."""

    both: Linear
    act: Activation
    name: str | None
    activated: int
    kernels: StepKernels | None
    code_scale: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        halves, name, kernels = self.both(x), self.name, self.kernels
        if name and isinstance(kernels, FusedKernels):
            return kernels.gate(halves, name, self.activated, self.code_scale)
        if name and kernels is not None:
            return kernels.gate(halves, name, self.activated)
        parts = halves.chunk(2, dim=-1)
        return self.act(parts[self.activated]).mul_(parts[1 - self.activated])

    @property
    def input_scale(self) -> Tensor | None:
        """See `linear.input_scale`."""
        return input_scale(self.both)


def gated_halves(
    place: Placement, both: Linear, act: Activation, activated: int = 1, code_scale: Tensor | None = None
) -> Linear:
    """act(one half) * other half of the output of `both`. `activated`: index of the half that is activated.

    `code_scale`: `input_scale` of the layer that reads the result, which may then be E4M3 codes.
    """
    kernels = step_kernels_for(place.device, place.dtype)
    return _GatedHalves(both, act, NATIVE_ACTIVATIONS.get(act), activated, kernels, code_scale)
