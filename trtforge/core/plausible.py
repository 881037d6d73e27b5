"""Upper bounds of numbers that determine sizes, so that files cannot cause unbounded allocations or loops.

Each bound is several times the largest value of a published model or machine.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trtforge.core.errors import ForgeError

_LAYERS, _HEADS, _WIDTH, _WIDE, _VOCAB, _TOKENS = 1_024, 4_096, 1 << 18, 1 << 21, 1 << 23, 1 << 30
_EXPERTS, _RANKS, _REQUESTS = 4_096, 1_024, 1 << 20

LARGEST: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "first_k_dense_replace"), _LAYERS),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_kv_heads"), _HEADS),
        **dict.fromkeys(("hidden_size", "n_embd", "head_dim", "head_size", "word_embed_proj_dim"), _WIDTH),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _WIDTH),
        **dict.fromkeys(("rotary_dim", "rotary_embedding_dim"), _WIDTH),
        **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), _WIDE),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _WIDE),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), _HEADS),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), _WIDTH),
        "vocab_size": _VOCAB,
        **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window", "attention_chunk_size"), _TOKENS),
        **dict.fromkeys(
            ("original_max_position_embeddings", "max_seq_len", "max_input_len", "max_num_tokens"), _TOKENS
        ),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), _EXPERTS),
        **dict.fromkeys(("num_experts_per_tok", "top_k"), _EXPERTS),
        **dict.fromkeys(("tp_size", "pp_size", "cp_size", "moe_tp_size", "moe_ep_size", "world_size"), _RANKS),
        **dict.fromkeys(("tp", "pp", "ep", "cp"), _RANKS),
        **dict.fromkeys(("max_batch_size", "max_beam_width"), _REQUESTS),
        **dict.fromkeys(("max_queue_size", "tokens_per_block"), _REQUESTS),
        "kv_cache_tokens": _TOKENS * _REQUESTS,
    }
)
"""The largest value of a key in a model's or an engine's configuration, at any level."""

MOST_EXPERTS = 1 << 17
"""Experts of all layers together. DeepSeek-V3 has 14,848, Kimi K2 23,040."""

_DEEPEST = 8


def require_plausible(values: Mapping[str, Any], where: str, hint: str) -> None:
    """Raise ForgeError naming `where`, the key, its value and the limit for an implausibly large number.

    Nested objects are checked too. Other types and too small numbers are left to the caller.
    """
    _look_through(values, "", where, hint, _DEEPEST)
    layers, experts = _first(values, "num_hidden_layers", "n_layer"), _first(values, *_EXPERT_KEYS)
    if layers * experts > MOST_EXPERTS:
        said = f"{layers:,} layers of {experts:,} experts"
        raise ForgeError(f"{where}: {said} are implausible: the limit is {MOST_EXPERTS:,} experts in all", hint=hint)


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def _look_through(values: Mapping[str, Any], prefix: str, where: str, hint: str, depth: int) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and depth:
            _look_through(value, f"{prefix}{key}.", where, hint, depth - 1)
        limit = LARGEST.get(key)
        if limit is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value > limit:
            raise ForgeError(
                f"{where}: {prefix}{key} is {value:,}, which is implausible: the limit is {limit:,}", hint=hint
            )


def _first(values: Mapping[str, Any], *keys: str) -> int:
    found = (values.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int)), 0)
