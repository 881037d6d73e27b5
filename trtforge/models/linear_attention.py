"""Sizes of linear attention (gated DeltaNet), from the keys that a model's and a checkpoint's config.json share."""

from collections.abc import Mapping
from typing import Any

from trtforge.core.dtypes import FLOAT32_BYTES
from trtforge.core.parallel import Parallel
from trtforge.models.family import Size, Sizes

LINEAR_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""Keys with integers, equal in Hugging Face's and TensorRT-LLM's config.json."""


def linear_sizes(values: Mapping[str, Any]) -> dict[Size, int]:
    """The sizes determined by `LINEAR_KEYS`; empty without these keys.

    in_proj_qkvz has, for each key head, its query and key, then values and gates of its value heads; in_proj_ba
    likewise two numbers for each value head (transformers/models/qwen3_next/modeling_qwen3_next.py).
    """
    found = [value for key in LINEAR_KEYS if isinstance(value := values.get(key), int) and value > 0]
    if len(found) < len(LINEAR_KEYS):
        return {}
    groups, heads, key_size, value_size, kernel = found
    keys, vectors = groups * key_size, heads * value_size
    return {
        "linear_k": keys,
        "linear_v": vectors,
        "linear_qkvz": 2 * (keys + vectors),
        "linear_ba": 2 * heads,
        "linear_groups": groups,
        "linear_heads": heads,
        "linear_head": value_size,
        "conv_kernel": kernel,
    }


def state_bytes(sizes: Sizes, itemsize: int, parallel: Parallel, stage: int = 0) -> int:
    """Bytes of one sequence's states on a rank of a pipeline stage.

    Each layer with linear attention has a float32 matrix (key size, value size) for each value head, and the last
    inputs of the convolution in the model's dtype.
    """
    layers = sizes.linear_layers.intersection(parallel.layers_of(stage, sizes.num_layers))
    if not layers:
        return 0
    matrices = sizes.of("linear_k") // sizes.of("linear_groups") * sizes.of("linear_v")
    inputs = (sizes.of("conv_kernel") - 1) * sizes.total(("linear_k", "linear_k", "linear_v"))
    return len(layers) * (matrices * FLOAT32_BYTES + inputs * itemsize) // parallel.tp
