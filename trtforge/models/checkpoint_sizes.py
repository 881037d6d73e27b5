"""Sizes of a model from its checkpoint's config.json, for rules about its linear layers."""

from collections.abc import Iterator

from trtforge.formats.checkpoint_keys import numbers
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.family import Family, Linear, Size, Sizes
from trtforge.models.linear_attention import linear_sizes


def sizes_of(checkpoint: CheckpointConfig) -> Sizes:
    """The sizes of linear layers, without those of latent attention's inner matrices."""
    more = checkpoint.model_extra or {}
    moe = more.get("moe")
    found: dict[Size, object] = {
        "experts": checkpoint.experts,
        "moe_intermediate": more.get("moe_intermediate_size") or more.get("moe_inter_size"),
        "shared_intermediate": moe.get("shared_expert_intermediate_size") if isinstance(moe, dict) else 0,
        "v_mla": _product(checkpoint.num_attention_heads, more.get("v_head_dim")),
    }
    linear = linear_sizes(more)
    return Sizes(
        num_layers=checkpoint.num_hidden_layers,
        num_heads=checkpoint.num_attention_heads,
        num_kv_heads=checkpoint.num_key_value_heads,
        head_size=checkpoint.head_size,
        hidden=checkpoint.hidden_size,
        intermediate=checkpoint.intermediate_size,
        vocab=checkpoint.vocab_size,
        max_positions=checkpoint.max_position_embeddings or 0,
        more={name: value for name, value in found.items() if isinstance(value, int)} | linear,
        linear_layers=frozenset(map(int, numbers(checkpoint, "linear_layers") or ())) if linear else frozenset(),
    )


def quantised_linears(checkpoint: CheckpointConfig, family: Family) -> Iterator[Linear]:
    """The quantisable linear layers that exist in some decoder layer."""
    sizes = sizes_of(checkpoint)
    for row in family.linears:
        match row.when:
            case "dense_layer":
                present = not checkpoint.experts or has_dense_layers(checkpoint)
            case "shared_layer":
                present = checkpoint.experts > 0 and sizes.of("shared_intermediate") > 0
            case _:
                present = True
        if present:
            yield row


def has_dense_layers(checkpoint: CheckpointConfig) -> bool:
    """Whether a mixture of experts has layers without experts."""
    more = checkpoint.model_extra or {}
    return bool(
        more.get("mlp_only_layers")
        or more.get("decoder_sparse_step", 1) != 1
        or more.get("first_k_dense_replace", 0) != 0
    )


def _product(number: int, other: object) -> int | None:
    return number * other if isinstance(other, int) else None
