"""Adds transformers 4's key names to a config.json of transformers 5, as TensorRT-LLM's releases use transformers 4.

transformers 4 ignores `rope_parameters`: for a model saved by transformers 5 it would silently use the default RoPE
base. Both versions read the result alike. Source: transformers 5.23,
`RotaryEmbeddingConfigMixin.convert_rope_params_to_dict` (modeling_rope_utils.py), and `Gemma3TextConfig` for rotations
by layer type.
"""

from collections.abc import Mapping
from typing import Any

_OF_NO_SCALING = ("rope_theta", "partial_rotary_factor")


def with_older_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json and its `text_config`, with missing older names added."""
    found = dict(values)
    if "dtype" in found:
        found.setdefault("torch_dtype", found["dtype"])
    rope = found.get("rope_parameters")
    if isinstance(rope, dict):
        whole = rope.get("full_attention", rope)
        found = _rotation(whole if isinstance(whole, dict) else {}) | found
        local = rope.get("sliding_attention")
        if isinstance(local, dict) and "rope_theta" in local:
            found.setdefault("rope_local_base_freq", local["rope_theta"])
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = with_older_names(text)
    return found


def _rotation(rope: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `partial_rotary_factor` and `rope_scaling` of one kind of layers."""
    found = {key: rope[key] for key in _OF_NO_SCALING if key in rope}
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {key: value for key, value in rope.items() if key not in _OF_NO_SCALING}
    return found
