"""Position embedding of a checkpoint's config.json: its kind, rotary embeddings and sliding windows by layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtforge.core.errors import ForgeError
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
class Reach:
    """The tokens, up to itself, that a token attends to: the last `window`, or those in its `chunk`; None: all."""

    window: int | None = None
    chunk: int | None = None


ALL = Reach()


@dataclass(frozen=True)
class Temperature:
    """The query at position p is multiplied by log(1 + floor((p + 1) / floor)) * scale + 1.

    Source: transformers/models/llama4/modeling_llama4.py, Llama4TextAttention.
    """

    floor: float
    scale: float


@dataclass(frozen=True)
class LayerSpec:
    """The differences between layers: sliding window in tokens (None: no window), index of the rotary embedding (None:
    queries and keys are not rotated).

    `chunk`: tokens per chunk; a token attends only to its own chunk. `l2_norm`: queries and keys are normalised after
    their rotation, without a weight. `temperature`: queries grow with their position. `linear`: the layer has linear
    attention; the other fields do not apply.
    """

    window: int | None
    rotary: int | None
    chunk: int | None = None
    l2_norm: bool = False
    temperature: Temperature | None = None
    linear: bool = False

    @property
    def reach(self) -> Reach:
        """The tokens that a token attends to."""
        return Reach(self.window, self.chunk)


def layer_spec(config: CheckpointConfig, layer: int) -> LayerSpec:
    """Layer `layer` of the whole model.

    Sliding-window layers use the second rotary embedding if rope_local_base_freq is set; with rope_in_windows_only,
    other layers use none. With nope_layers, no layer has a window, and the layers not listed have chunks and rotary
    embeddings. Layers in linear_layers have linear attention.
    """
    if layer in (numbers(config, "linear_layers") or ()):
        return LayerSpec(None, rotary=None, linear=True)
    window = attention_window(config, layer)
    without_positions = numbers(config, "nope_layers")
    if without_positions is not None:
        return _in_chunks(config, rotated=layer not in without_positions)
    if window is None and flag(config, "rope_in_windows_only"):
        return LayerSpec(window, rotary=None)
    local = window is not None and number(config, "rope_local_base_freq", 0.0) > 0
    return LayerSpec(window, rotary=1 if local else 0)


def _in_chunks(config: CheckpointConfig, *, rotated: bool) -> LayerSpec:
    if rotated:
        chunk = integer(config, "attention_chunk_size")
        return LayerSpec(None, rotary=0, chunk=chunk if chunk > 0 else None, l2_norm=flag(config, "qk_l2_norm"))
    tuned = flag(config, "attn_temperature_tuning")
    temperature = Temperature(number(config, "floor_scale", 1.0), number(config, "attn_scale", 0.0))
    return LayerSpec(None, rotary=None, temperature=temperature if tuned else None)


def rotaries(config: CheckpointConfig, network: Network, dim: int | None) -> tuple[RotarySpec, ...]:
    """The rotary embeddings of the layers; none for other position embeddings. `dim`: None to take config.json's."""
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
    """TensorRT-LLM's GPT-J reads rotary_dim and its GPTs rotary_pct; both may contradict rotary_embedding_dim.

    Raises ForgeError for less than two elements, and for more than a head has.
    """
    by_fraction = int(config.head_size * number(config, "rotary_pct", 0.0))
    dim = integer(config, "rotary_dim") or by_fraction or config.rotary_embedding_dim or config.head_size
    if not 2 <= dim <= config.head_size:
        raise ForgeError(
            f"{dim} elements of a head of {config.head_size} cannot be rotated", hint="Convert the checkpoint again."
        )
    return dim


def _longrope(config: CheckpointConfig) -> Mapping[str, Any]:
    """TensorRT-LLM's keys as the rotary_scaling object of transformers."""
    return {
        "rope_type": "longrope",
        "short_factor": numbers(config, "longrope_scaling_short_factors"),
        "long_factor": numbers(config, "longrope_scaling_long_factors"),
        "original_max_position_embeddings": integer(config, "original_max_position_embeddings"),
    }
