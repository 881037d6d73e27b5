"""Speculative decoding of an engine: the method, the draft tokens of a step and the KV positions that they need.

Sources: tensorrt_llm/builder.py, `build()`; models/medusa/config.py and models/eagle/config.py (0.17 to 1.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trtforge.core.errors import ForgeError
from trtforge.core.features import SPECULATION, Drafting, EagleFeature, FeaturesConfig, MedusaFeature, SpeculationMethod
from trtforge.formats.eagle import EAGLE_DIRECTORY
from trtforge.formats.eagle_checkpoint import networks_in
from trtforge.formats.medusa import MEDUSA_DIRECTORY, heads_in
from trtforge.formats.trtllm import EAGLE_ARCHITECTURE, MEDUSA_ARCHITECTURE, CheckpointConfig
from trtforge.models.eagle_plan import EAGLE_DEPTH, EAGLE_TREE_TOKENS
from trtforge.models.medusa_plan import TREE_TOKENS

MODES: Mapping[SpeculationMethod, str] = MappingProxyType(
    {
        "draft": "DRAFT_TOKENS_EXTERNAL",
        "medusa": "MEDUSA",
        "eagle": "EAGLE",
        "lookahead": "LOOKAHEAD_DECODING",
        "ngram": "DRAFT_TOKENS_EXTERNAL",
    }
)
"""Members of TensorRT-LLM's `SpeculativeDecodingMode`, for the methods that engines have."""

DRAFTING_ARCHITECTURES: Mapping[SpeculationMethod, str] = MappingProxyType(
    {"medusa": MEDUSA_ARCHITECTURE, "eagle": EAGLE_ARCHITECTURE}
)
"""Architectures of checkpoints that include draft heads or networks."""

BASES: Mapping[SpeculationMethod, tuple[str, ...]] = MappingProxyType(
    {
        "medusa": ("LlamaForCausalLM", "MistralForCausalLM", "QWenForCausalLM", "Qwen2ForCausalLM"),
        "eagle": ("LlamaForCausalLM", "MistralForCausalLM"),
    }
)
"""Architectures that TensorRT-LLM's Medusa and EAGLE extend (models/medusa/model.py, models/eagle/model.py)."""

EAGLE_MOST_REQUESTS, EAGLE_MOST_DRAFT_TOKENS = 512, 256
"""Limits that `build()` asserts."""


@dataclass(frozen=True)
class Speculation:
    """`draft_tokens`: verified in one step; `depth`: runs of EAGLE's network in a step, 0 for other methods."""

    method: SpeculationMethod
    draft_tokens: int
    depth: int = 0

    @property
    def mode(self) -> str:
        """TensorRT-LLM's name of the method."""
        return MODES[self.method]

    @property
    def spare_tokens(self) -> int:
        """KV positions that a request needs beyond its length: what `build()` adds to max_seq_len."""
        return self.draft_tokens + self.depth


def speculation_of(features: FeaturesConfig, checkpoint: CheckpointConfig | None = None) -> Speculation | None:
    """The speculation of an engine, None without. Values stored in `checkpoint` take precedence over the features'.

    `checkpoint`: None if it is not converted yet.
    """
    method = next((name for name in SPECULATION if getattr(features, name) is not None), None)
    match method:
        case "draft":
            assert features.draft is not None
            return Speculation(method, features.draft.tokens)
        case "lookahead":
            assert features.lookahead is not None
            return Speculation(method, features.lookahead.draft_tokens)
        case "eagle3" | "mtp" | "ngram":
            found = getattr(features, method)
            return Speculation(method, found.draft_tokens)
        case "medusa":
            assert features.medusa is not None
            if _beside(features.medusa, checkpoint):
                return Speculation(method, features.medusa.most_drafted)
            tokens = stored(checkpoint, "max_draft_len") or features.medusa.draft_tokens or TREE_TOKENS
            return Speculation(method, tokens)
        case "eagle":
            assert features.eagle is not None
            asked = features.eagle
            if _beside(asked, checkpoint):
                return Speculation(method, asked.most_drafted)
            tokens = stored(checkpoint, "max_draft_len") or asked.draft_tokens or EAGLE_TREE_TOKENS
            depth = stored(checkpoint, "num_eagle_layers") or asked.depth or asked.tree_depth or EAGLE_DEPTH
            return Speculation(method, tokens, depth)
        case None:
            return None


def with_stored_heads(
    features: FeaturesConfig, checkpoint: CheckpointConfig | None, *, embedded: bool
) -> FeaturesConfig:
    """The features of an engine of `checkpoint`: its Medusa heads or EAGLE networks draft, unless the features name
    another method.

    `embedded`: the engine is of the torch backend, which stores them in separate files. Raises ForgeError if its
    features name other files.
    """
    if checkpoint is None:
        return features
    heads, networks = heads_in(checkpoint), networks_in(checkpoint)
    method: SpeculationMethod = "medusa" if heads is not None else "eagle"
    asked: Drafting | None = getattr(features, method)
    others = any(getattr(features, name) is not None for name in SPECULATION if name != method)
    if (heads is None and networks is None) or others:
        return features
    update: dict[str, object] = {"model": _KEPT[method]} if embedded else {}
    if embedded and asked is not None and asked.model not in (None, _KEPT[method]):
        raise ForgeError(
            f"engine.features.{method}.model: the checkpoint has {'heads' if heads else 'a network'} of its own",
            hint="Leave model out, or convert the model alone.",
        )
    if heads is not None:
        medusa = features.medusa or MedusaFeature()
        update |= {"heads": medusa.heads or heads[0], "layers": medusa.layers or heads[1]}
        return features.model_copy(update={"medusa": medusa.model_copy(update=update)})
    assert networks is not None
    eagle = features.eagle or EagleFeature()
    update["depth"] = eagle.depth or networks
    return features.model_copy(update={"eagle": eagle.model_copy(update=update)})


_KEPT: Mapping[SpeculationMethod, str] = MappingProxyType({"medusa": MEDUSA_DIRECTORY, "eagle": EAGLE_DIRECTORY})


def _beside(asked: Drafting, checkpoint: CheckpointConfig | None) -> bool:
    """Whether the embedded engine drafts, with the files of `asked` or the heads or network of the checkpoint."""
    method: SpeculationMethod = "medusa" if isinstance(asked, MedusaFeature) else "eagle"
    holds = checkpoint is not None and checkpoint.architecture == DRAFTING_ARCHITECTURES[method]
    return asked.model is not None and (not holds or asked.model == _KEPT[method])


def stored(checkpoint: CheckpointConfig | None, key: str) -> int | None:
    """An integer of config.json that only checkpoints with draft heads or networks have; None if absent."""
    value = (checkpoint.model_extra or {}).get(key) if checkpoint is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
