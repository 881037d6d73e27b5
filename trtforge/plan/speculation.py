"""Speculative decoding as an engine has it: who drafts, how many tokens a step verifies, what that adds to a request.

Sources: tensorrt_llm/builder.py, `build()`; models/medusa/config.py and models/eagle/config.py (0.17 to 1.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trtforge.core.features import SPECULATION, FeaturesConfig, SpeculationMethod
from trtforge.formats.trtllm import CheckpointConfig

MODES: Mapping[SpeculationMethod, str] = MappingProxyType(
    {
        "draft": "DRAFT_TOKENS_EXTERNAL",
        "medusa": "MEDUSA",
        "eagle": "EAGLE",
        "lookahead": "LOOKAHEAD_DECODING",
    }
)
"""Members of TensorRT-LLM's `SpeculativeDecodingMode`."""

DRAFTING_ARCHITECTURES: Mapping[SpeculationMethod, str] = MappingProxyType(
    {"medusa": "MedusaForCausalLM", "eagle": "EagleForCausalLM"}
)
"""Checkpoints that hold what drafts."""

TREE_TOKENS, MEDUSA_HEADS, MEDUSA_LAYERS, EAGLE_DEPTH = 63, 4, 1, 4
"""What TensorRT-LLM's converters write unless told otherwise: for a plan before there is a checkpoint."""

EAGLE_MOST_REQUESTS, EAGLE_MOST_DRAFT_TOKENS = 512, 256
"""Assertions of `build()`."""


@dataclass(frozen=True)
class Speculation:
    """`draft_tokens` are verified in one step; `depth`: how often EAGLE's network runs in it, else 0."""

    method: SpeculationMethod
    draft_tokens: int
    depth: int = 0

    @property
    def mode(self) -> str:
        """TensorRT-LLM's name."""
        return MODES[self.method]

    @property
    def spare_tokens(self) -> int:
        """Positions beyond its length that a request takes: what `build()` adds to max_seq_len."""
        return self.draft_tokens + self.depth


def speculation_of(features: FeaturesConfig, checkpoint: CheckpointConfig | None = None) -> Speculation | None:
    """How an engine of `checkpoint` speculates; its own number of draft tokens counts where it holds the heads.

    None: there is no checkpoint yet.
    """
    method = next((name for name in SPECULATION if getattr(features, name) is not None), None)
    match method:
        case "draft":
            assert features.draft is not None
            return Speculation(method, features.draft.tokens)
        case "lookahead":
            assert features.lookahead is not None
            return Speculation(method, features.lookahead.draft_tokens)
        case "medusa":
            assert features.medusa is not None
            tokens = stored(checkpoint, "max_draft_len") or features.medusa.draft_tokens or TREE_TOKENS
            return Speculation(method, tokens)
        case "eagle":
            assert features.eagle is not None
            asked = features.eagle
            tokens = stored(checkpoint, "max_draft_len") or asked.draft_tokens or TREE_TOKENS
            depth = stored(checkpoint, "num_eagle_layers") or asked.depth or asked.tree_depth or EAGLE_DEPTH
            return Speculation(method, tokens, depth)
        case None:
            return None


def stored(checkpoint: CheckpointConfig | None, key: str) -> int | None:
    """A number of config.json that only checkpoints with heads or networks of their own have."""
    value = (checkpoint.model_extra or {}).get(key) if checkpoint is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
