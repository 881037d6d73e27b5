"""The dense MLPs: plain, and gated in the two ways that TensorRT-LLM stores them."""

from torch import Tensor

from trtforge.runtime.architecture.activations import Activation, activation_of
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.linears.linear import Linear


def load_mlp(loader: Loader, name: str) -> Linear:
    """The MLP of a layer; its output is summed over ranks."""
    network = loader.spec.network
    act = activation_of(loader.spec.hidden_act, exact_gelu=network.exact_gelu)
    proj = loader.row_parallel(f"{name}.proj", bias_in_parts=network.proj_bias_in_parts)
    match network.mlp:
        case "gated":
            # TensorRT-LLM's `fc` is what Hugging Face calls gate_proj, its `gate` is up_proj.
            pair = loader.pair(f"{name}.fc", f"{name}.gate")

            def gated(x: Tensor) -> Tensor:
                fc, gate = pair(x)
                return proj(act(fc).mul_(gate))

            return gated
        case "up_gate":
            up_gate = gated_halves(loader.linear(f"{name}.fc"), act)
            return lambda x: proj(up_gate(x))
        case "plain":
            fc = loader.linear(f"{name}.fc")
            return lambda x: proj(act(fc(x)))


def gated_halves(fc: Linear, act: Activation) -> Linear:
    """act(gate) * up, where one layer computes [up; gate]."""

    def inner(x: Tensor) -> Tensor:
        up, gate = fc(x).chunk(2, dim=-1)
        return act(gate).mul_(up)

    return inner
