"""Which trees of draft tokens (`choices` of Medusa heads and EAGLE networks) the embedded engine supports."""

from collections.abc import Iterator

from trtforge.core.features import MOST_NODES, FeaturesConfig, MedusaFeature
from trtforge.formats.attention_windows import attention_windows
from trtforge.formats.checkpoint_keys import integer
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.legality import Problem

_BACKEND = "or use the tensorrt_llm backend."


def tree_problems(features: FeaturesConfig, model: CheckpointConfig, *, states: bool) -> Iterator[Problem]:
    """Problems of trees that are too large or do not suit the model. `states`: the model has linear attention.

    Tokens of a tree are consecutive in the KV cache, whichever token they follow. Windows, chunks and ALiBi depend on
    the distance of two tokens in the cache, and states of linear attention include every token.
    """
    for name, feature in (("medusa", features.medusa), ("eagle", features.eagle)):
        if feature is None or feature.choices is None:
            continue
        where = f"engine.features.{name}.choices"
        if len(feature.choices) > MOST_NODES:
            message = f"{where} has {len(feature.choices)} nodes, the torch backend supports at most {MOST_NODES}"
            yield Problem("speculation", message, f"Remove the least likely nodes, {_BACKEND}")
        if feature.draft_tokens is not None and len(feature.choices) > feature.draft_tokens:
            yield too_many_nodes("speculation", where, len(feature.choices), feature.draft_tokens)
        most = feature.heads if isinstance(feature, MedusaFeature) else feature.depth
        if most is not None and (deep := max(map(len, feature.choices))) > most:
            said = f"{most} heads are used" if isinstance(feature, MedusaFeature) else f"depth is {most}"
            message = f"{where} are {deep} tokens deep, and {said}"
            yield Problem("speculation", message, f"Use choices of at most {most} tokens.")
        if (rank := max(map(max, feature.choices))) >= model.vocab_size:
            message = f"{where} has rank {rank}, but the vocabulary has {model.vocab_size} tokens"
            yield Problem("speculation", message, f"Use ranks below {model.vocab_size}.")
        if (attention := _other_attention(model, states=states)) is not None:
            message = f"{where}: not supported by the torch backend for models with {attention}"
            yield Problem("speculation", message, f"Leave choices out, {_BACKEND}")


def too_many_nodes(rule: str, where: str, nodes: int, most: int) -> Problem:
    """The problem of a tree with more nodes than draft tokens. `where`: the key of its choices."""
    return Problem(
        rule, f"{where} has {nodes} nodes, more than the {most} draft tokens", "Remove the least likely nodes."
    )


def _other_attention(model: CheckpointConfig, *, states: bool) -> str | None:
    """The kind of attention in the model besides plain attention to all earlier tokens; None if there is none."""
    if states:
        return "linear attention"
    if any(attention_windows(model)):
        return "sliding windows"
    if integer(model, "attention_chunk_size"):
        return "attention in chunks"
    return "ALiBi" if "alibi" in model.position_embedding_type else None
