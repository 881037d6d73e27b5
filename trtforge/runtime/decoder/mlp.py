"""The dense MLPs: plain, and gated in the two ways that TensorRT-LLM stores them."""

from torch import Tensor

from trtforge.runtime.architecture.activations import NATIVE_ACTIVATIONS, Activation, activation_of
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.linears.linear import Linear, Placement
from trtforge.runtime.native.activations import activate
from trtforge.runtime.native.bindings import native_for


def load_mlp(loader: Loader, name: str) -> Linear:
    """The MLP of a layer; its output is summed over ranks."""
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
    name, kernels = NATIVE_ACTIVATIONS.get(act), native_for(place.device, place.dtype)

    def inner(x: Tensor) -> Tensor:
        halves = both(x)
        if name and kernels is not None:
            return kernels.gate(halves, name, activated)
        parts = halves.chunk(2, dim=-1)
        return act(parts[activated]).mul_(parts[1 - activated])

    return inner
