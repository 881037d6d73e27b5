"""Activation functions by TensorRT-LLM's hidden_act, which has separate names for gated MLPs (swiglu, geglu)."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]

_tanh_gelu: Activation = partial(functional.gelu, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "swiglu": functional.silu,
    "gelu": _tanh_gelu,  # as in TensorRT-LLM; Network.exact_gelu is set for families whose models use the exact one
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "geglu": _tanh_gelu,
    "relu": functional.relu,
    "squared-relu": _squared_relu,
}

NATIVE_ACTIVATIONS: dict[Activation, str] = {
    functional.silu: "silu",
    _tanh_gelu: "gelu_tanh",
    functional.gelu: "gelu",
    functional.relu: "relu",
    _squared_relu: "squared_relu",
}
"""Names of activation functions in `native.bindings`."""


def activation_of(hidden_act: str, *, exact_gelu: bool) -> Activation:
    """The activation function. `exact_gelu`: "gelu" is the exact GELU, by the error function."""
    return functional.gelu if exact_gelu and hidden_act == "gelu" else ACTIVATIONS[hidden_act]
