"""Memory of speculative decoding: a draft model, Medusa heads, EAGLE's network or MTP layers, and their logits.

Sources: tensorrt_llm/models/medusa/model.py and models/eagle/model.py (1.x); for the LLM API
_torch/models/modeling_speculative.py and modeling_deepseekv3.py (`DeepseekV3MTP`). Draft tokens are verified in one
step, so the target computes logits for each of them (cpp/tensorrt_llm/runtime/decodingInput.h).
"""

from dataclasses import dataclass

from trtforge.core.features import FeaturesConfig, MedusaFeature
from trtforge.core.parallel import Parallel
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.family import Facts, Sizes
from trtforge.models.medusa_plan import MEDUSA_HEADS, MEDUSA_LAYERS
from trtforge.plan.formats import WEIGHTS
from trtforge.plan.kv import bytes_per_token, cached_layers
from trtforge.plan.limits import EngineLimits
from trtforge.plan.model import Model
from trtforge.plan.weights import RankWeights, Stored

_LOGIT_BYTES = 4


@dataclass(frozen=True)
class Drafter:
    """Bytes on one rank: draft weights, KV cache of a token, and logits of a step."""

    weights: int = 0
    kv_per_token: int = 0
    logits: int = 0

    @property
    def fixed(self) -> int:
        """Bytes without the KV cache."""
        return self.weights + self.logits


@dataclass(frozen=True)
class Target:
    """The target model on one rank; `ranks` are its weights."""

    facts: Facts
    ranks: RankWeights
    parallel: Parallel
    limits: EngineLimits
    itemsize: int
    cache_itemsize: int


def drafter(features: FeaturesConfig, draft: Model | None, target: Target, stage: int) -> Drafter:
    """Memory that speculation adds to a rank of one pipeline stage; `draft`: the draft model, if one is named.

    Heads, EAGLE's network and all logits are on the last stage. The draft model is assumed to be unquantised, in the
    target's dtype, split like the target, with a KV cache of the target's format: both cache the same tokens.
    """
    limits, parallel, last = target.limits, target.parallel, stage == target.parallel.pp - 1
    if limits.speculation is None:
        return Drafter()
    vocab, sequences = target.facts.sizes.vocab, limits.max_batch_size
    logits = sequences * limits.speculation.draft_tokens * vocab * _LOGIT_BYTES if last else 0
    if features.medusa is not None and last:
        heads = (features.medusa.heads or MEDUSA_HEADS) * sequences * limits.verified_tokens * vocab * _LOGIT_BYTES
        weights = medusa_bytes(target.facts.sizes, parallel, features.medusa, target.itemsize)
        return Drafter(weights=weights, logits=logits + heads)
    if features.eagle is not None and last:
        one = bytes_per_token(target.facts.sizes, target.cache_itemsize, parallel)
        return Drafter(
            weights=limits.speculation.depth * eagle_bytes(target),
            kv_per_token=one // cached_layers(target.facts.sizes, parallel),
            logits=logits,
        )
    if (features.eagle3 is not None or features.mtp is not None) and last:
        one = bytes_per_token(target.facts.sizes, target.cache_itemsize, parallel)
        network = eagle3_bytes(target) if features.eagle3 is not None else mtp_bytes(target)
        return Drafter(network, one // cached_layers(target.facts.sizes, parallel), logits)
    if draft is not None:
        layout = Layout(parallel, "bfloat16" if target.itemsize == 2 else "float32")
        plain = Stored(WEIGHTS["none"], target.itemsize)
        return Drafter(
            weights=draft.weights(layout).nbytes(plain, parallel, stage),
            kv_per_token=bytes_per_token(draft.facts.sizes, target.cache_itemsize, parallel),
            logits=logits + (sequences * vocab * _LOGIT_BYTES if last else 0),
        )
    return Drafter(logits=logits)


def medusa_bytes(sizes: Sizes, parallel: Parallel, medusa: MedusaFeature, itemsize: int) -> int:
    """Medusa heads on one rank: each has `layers` square matrices with biases and an LM head, all column-parallel.

    heads x (layers x (hidden² + hidden) + hidden x vocabulary) / tp
    """
    vocab = -(-sizes.vocab // parallel.tp) * parallel.tp
    layers = (medusa.layers or MEDUSA_LAYERS) * (sizes.hidden * sizes.hidden + sizes.hidden)
    return (medusa.heads or MEDUSA_HEADS) * (layers + sizes.hidden * vocab) * itemsize // parallel.tp


def eagle_bytes(target: Target) -> int:
    """One EAGLE network on one rank: a decoder layer of the target's sizes, the projection of token embedding and
    hidden state (2 x hidden to hidden), an embedding and an LM head. An engine holds one for each run in a step."""
    sizes, tp = target.facts.sizes, target.parallel.tp
    plain = Stored(WEIGHTS["none"], target.itemsize)
    join = (2 * sizes.hidden * sizes.hidden + sizes.hidden) // tp
    tables = sizes.vocab * sizes.hidden + -(-sizes.vocab // tp) * sizes.hidden
    return target.ranks.kinds[0].nbytes(plain) + (join + tables) * target.itemsize


def eagle3_bytes(target: Target) -> int:
    """One EAGLE-3 network on one rank, at most: a decoder layer of the target's sizes whose query, key and value read
    token embedding and hidden state, the projection of three hidden states to one, and an LM head for all tokens.

    The networks that are published have LM heads for fewer tokens; the embedding is the target's.
    """
    sizes, tp = target.facts.sizes, target.parallel.tp
    plain = Stored(WEIGHTS["none"], target.itemsize)
    wider = sizes.hidden * (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size // tp
    join = 3 * sizes.hidden * sizes.hidden // tp
    head = -(-sizes.vocab // tp) * sizes.hidden
    return target.ranks.kinds[0].nbytes(plain) + (wider + join + head) * target.itemsize


def mtp_bytes(target: Target) -> int:
    """One MTP layer on one rank: a decoder layer like the last one, and the projection of token embedding and hidden
    state; embedding and LM head are the target's. All draft tokens come from one layer."""
    sizes, tp = target.facts.sizes, target.parallel.tp
    plain = Stored(WEIGHTS["none"], target.itemsize)
    last = target.ranks.kinds[target.ranks.layers[-1]]
    return last.nbytes(plain) + 2 * sizes.hidden * sizes.hidden // tp * target.itemsize
