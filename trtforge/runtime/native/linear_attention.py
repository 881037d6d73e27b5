"""What linear attention computes before and after the delta rule, by the kernels (source/linear_attention.cpp)."""

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native
from trtforge.runtime.native.delta_rule import Parts
from trtforge.runtime.native.structures import DeltaInputs, GatedNorm


def delta_inputs(
    kernels: Native, convolved: Tensor, projected: Tensor, decay: Tensor, bias: Tensor, sizes: tuple[int, int, int]
) -> Parts:
    """The delta rule's float32 inputs: normalised queries and keys, values, rates and log decays for each value head.

    convolved: (tokens, channels), the queries and keys of the key heads, then values; projected: (tokens, key heads, 2,
    value heads per key head), rates and steps before their activations; decay, bias: float32 (value heads,). `sizes`:
    number of key heads, key size and value size of a head.
    """
    convolved, projected = convolved.contiguous(), projected.contiguous()
    key_heads, key_size, value_size = sizes
    tokens, heads = len(convolved), len(decay)
    queries, keys, values, rates, decays = (
        torch.empty(tokens, heads, *size) for size in ((key_size,), (key_size,), (value_size,), (), ())
    )
    given = DeltaInputs(
        convolved=convolved.data_ptr(),
        projected=projected.data_ptr(),
        decay=decay.data_ptr(),
        bias=bias.data_ptr(),
        queries=queries.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        rates=rates.data_ptr(),
        decays=decays.data_ptr(),
        tokens=tokens,
        key_heads=key_heads,
        value_heads=heads,
        key_size=key_size,
        value_size=value_size,
    )
    kernels.run("delta_inputs", TYPES[convolved.dtype], given)
    return queries, keys, values, rates, decays


def norm_gated(kernels: Native, x: Tensor, gates: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The RMS norm of x (..., size) times the weight (size,) times silu(gates); all tensors have one dtype."""
    x, gates = x.contiguous(), gates.contiguous()
    y = torch.empty_like(x)
    pointers = {"x": x.data_ptr(), "gates": gates.data_ptr(), "weight": weight.data_ptr(), "y": y.data_ptr()}
    size = x.shape[-1]
    given = GatedNorm(**pointers, rows=x.numel() // size, size=size, epsilon=epsilon)
    kernels.run("norm_gated", TYPES[x.dtype], given)
    return y
