"""Weights of a multimodal model's vision part, from config.json: the tensors that conversion copies.

Modules and defaults of absent keys are those of `transformers` 5 (models/siglip, pixtral, gemma3, mistral3, llama4).
"""

from collections.abc import Mapping
from typing import Any

from trtforge.formats.hf import HfConfig


def vision_weights(config: HfConfig) -> int | None:
    """Number of weights of vision tower and projector; 0 without a vision part, None for an unknown one."""
    vision, text = config.values.get("vision_config"), config.values.get("text_config")
    if not isinstance(vision, dict) or not isinstance(text, dict):
        return None if isinstance(text, dict) else 0
    width, counts = text.get("hidden_size"), _counts(vision)
    if counts is None or not isinstance(width, int):
        return None
    match vision.get("model_type"):
        case "siglip_vision_model":
            return _siglip(vision, counts) + counts["hidden_size"] * (width + 1)
        case "pixtral":
            return _pixtral(counts) + _merging_projector(config.values, counts["hidden_size"], width)
        case "llama4_vision_model":
            return _llama4(counts) + counts["vision_output_dim"] * width
        case _:
            return None


_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "siglip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_channels": 3, "image_size": 224,
        "patch_size": 16,
    },
    "pixtral": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_channels": 3, "image_size": 1024,
        "patch_size": 16,
    },
    "llama4_vision_model": {
        "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_channels": 3, "image_size": 448,
        "patch_size": 14, "vision_output_dim": 7680, "projector_input_dim": 4096, "projector_output_dim": 4096,
    },
}  # fmt: skip


def _counts(vision: Mapping[str, Any]) -> Mapping[str, int] | None:
    """The sizes with their defaults; None for an unknown model and for sizes that are not positive integers."""
    defaults = _DEFAULTS.get(str(vision.get("model_type")))
    if defaults is None:
        return None
    found = {key: vision.get(key, default) for key, default in defaults.items()}
    return found if all(type(value) is int and value > 0 for value in found.values()) else None


def _siglip(vision: Mapping[str, Any], counts: Mapping[str, int]) -> int:
    hidden, inner, patch = counts["hidden_size"], counts["intermediate_size"], counts["patch_size"]
    norm, attention = 2 * hidden, 4 * (hidden * hidden + hidden)
    mlp = 2 * hidden * inner + inner + hidden
    patches = hidden * counts["num_channels"] * patch * patch + hidden
    positions = (counts["image_size"] // patch) ** 2 * hidden
    head = hidden + attention + norm + mlp if vision.get("vision_use_head", True) else 0
    return patches + positions + counts["num_hidden_layers"] * (attention + mlp + 2 * norm) + norm + head


def _pixtral(counts: Mapping[str, int]) -> int:
    hidden, inner, patch = counts["hidden_size"], counts["intermediate_size"], counts["patch_size"]
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    return hidden * counts["num_channels"] * patch * patch + hidden + counts["num_hidden_layers"] * layer


def _llama4(counts: Mapping[str, int]) -> int:
    """Llama 4's: class embedding, and an adapter with pixel shuffle before its MLP."""
    hidden, inner, patch = counts["hidden_size"], counts["intermediate_size"], counts["patch_size"]
    norm, attention = 2 * hidden, 4 * (hidden * hidden + hidden)
    mlp = 2 * hidden * inner + inner + hidden
    patches = hidden * counts["num_channels"] * patch * patch
    positions = ((counts["image_size"] // patch) ** 2 + 1) * hidden
    adapter = inner * counts["projector_input_dim"] + counts["projector_output_dim"] ** 2
    layers = counts["num_hidden_layers"] * (attention + mlp + 2 * norm)
    return hidden + positions + patches + layers + 2 * norm + adapter


def _merging_projector(values: Mapping[str, Any], hidden: int, width: int) -> int:
    """Mistral 3's: a norm, the merger of neighbouring patches and two linear layers."""
    merged, layers = int(values.get("spatial_merge_size", 2)), values.get("vision_feature_layer", -1)
    inputs = hidden * (len(layers) if isinstance(layers, list) else 1)
    biases = 2 * width if values.get("multimodal_projector_bias", False) else 0
    return hidden + hidden * hidden * merged * merged + inputs * width + width * width + biases
