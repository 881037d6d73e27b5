"""Position embedding of a checkpoint's config.json: its kind, rotary embeddings and sliding windows by layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtforge.formats.attention_windows import attention_window
from trtforge.formats.checkpoint_keys import flag, integer, number, numbers
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.architecture.network import Network
from trtforge.runtime.architecture.rotary import RotarySpec

Position = Literal["learned", "rope", "alibi", "scaled_alibi"]

POSITIONS: dict[str, Position] = {
    "learned_absolute": "learned",
    "rope_gpt_neox": "rope",
    "rope_gptj": "rope",
    "long_rope": "rope",
    "yarn": "rope",
    "alibi": "alibi",
    "alibi_with_scale": "scaled_alibi",
}
"""By TensorRT-LLM's position_embedding_type."""


@dataclass(frozen=True)
class LayerSpec:
    """What differs between layers: sliding window in tokens (None: no window) and index of the rotary embedding (None:
    queries and keys are not rotated)."""

    window: int | None
    rotary: int | None


def layer_spec(config: CheckpointConfig, layer: int) -> LayerSpec:
    """Layer `layer` of the whole model. Layers with a window use a second rotary if rope_local_base_freq is set, and
    the only one if rope_in_windows_only is."""
    window = attention_window(config, layer)
    if window is None and flag(config, "rope_in_windows_only"):
        return LayerSpec(window, rotary=None)
    local = window is not None and number(config, "rope_local_base_freq", 0.0) > 0
    return LayerSpec(window, rotary=1 if local else 0)


def rotaries(config: CheckpointConfig, network: Network, dim: int | None) -> tuple[RotarySpec, ...]:
    """The rotary embeddings of the layers; none for other kinds of position embedding. `dim` None: config.json's."""
    kind = config.position_embedding_type
    if POSITIONS[kind] != "rope":
        return ()
    whole = RotarySpec(
        dim=dim or _rotary_dim(config),
        base=number(config, "rotary_emb_base", config.rotary_base),
        max_positions=config.max_position_embeddings or 2048,
        scaling=_longrope(config) if kind == "long_rope" else config.rotary_scaling,
        interleaved=network.interleaved_rope or kind == "rope_gptj",
    )
    local_base = number(config, "rope_local_base_freq", 0.0)
    if not local_base:
        return (whole,)
    return (whole, RotarySpec(whole.dim, local_base, whole.max_positions, None, whole.interleaved))


def _rotary_dim(config: CheckpointConfig) -> int:
    """TensorRT-LLM's GPT-J reads rotary_dim and its GPTs rotary_pct; both may contradict rotary_embedding_dim."""
    by_fraction = int(config.head_size * number(config, "rotary_pct", 0.0))
    return integer(config, "rotary_dim") or by_fraction or config.rotary_embedding_dim or config.head_size


def _longrope(config: CheckpointConfig) -> Mapping[str, Any]:
    """TensorRT-LLM's keys as the rotary_scaling object of transformers."""
    return {
        "rope_type": "longrope",
        "short_factor": numbers(config, "longrope_scaling_short_factors"),
        "long_factor": numbers(config, "longrope_scaling_long_factors"),
        "original_max_position_embeddings": integer(config, "original_max_position_embeddings"),
    }
