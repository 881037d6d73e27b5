"""The drafter of an engine, made from its feature and what lies beside its ranks."""

from dataclasses import replace

from trtforge.core.errors import ForgeError
from trtforge.core.features import EagleFeature, LookaheadFeature, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature, NgramFeature
from trtforge.formats.eagle import EAGLE_DIRECTORY, read_eagle
from trtforge.formats.medusa import MEDUSA_DIRECTORY
from trtforge.formats.trtllm import DRAFT_ENGINE
from trtforge.runtime.draft_model import DraftModel
from trtforge.runtime.drafting import Drafter, NgramDrafter, Speculation
from trtforge.runtime.eagle import EagleDrafter
from trtforge.runtime.lookahead import LookaheadDrafter
from trtforge.runtime.medusa import MedusaDrafter
from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.rank_model import placement_of
from trtforge.runtime.ranks.source import EagleDrafts, Source, open_engine


def with_network(source: Source, feature: Speculation | None) -> Source:
    """`source` with the EAGLE network that `feature` drafts with, if it does. Raises ForgeError if it is damaged."""
    if not isinstance(feature, Eagle3Feature | EagleFeature):
        return source
    first = isinstance(feature, EagleFeature)
    network = read_eagle(source.directory / EAGLE_DIRECTORY, "eagle" if first else "eagle3", source.config)
    return replace(source, eagle=EagleDrafts(network, feature.chain))


def open_drafter(feature: Speculation | None, source: Source, ranks: RankGroup) -> Drafter | None:
    """The drafter of the engine `source` on `ranks`; None without speculation. Raises ForgeError if it is damaged.

    A draft model's KV cache has as many tokens as the engine's: more would be of no use.
    """
    if feature is None or isinstance(feature, NgramFeature):
        return None if feature is None else NgramDrafter(feature)
    if isinstance(feature, LookaheadFeature):
        return LookaheadDrafter(feature)
    if isinstance(feature, MedusaFeature):
        sizes = source.config.hidden_size, source.config.vocab_size
        place = placement_of(source, 0)
        return MedusaDrafter(source.directory / MEDUSA_DIRECTORY, sizes, feature.longest_chain, place, ranks)
    if isinstance(feature, Eagle3Feature | EagleFeature):
        assert source.eagle is not None, "see with_network"
        most = feature.max_requests if isinstance(feature, Eagle3Feature) else None
        return EagleDrafter(ranks, source.eagle.tokens, source.tokens_per_block, most)
    own = open_engine(source.directory / DRAFT_ENGINE)
    if own.config.vocab_size != source.config.vocab_size:
        raise ForgeError(
            f"the draft model has {own.config.vocab_size} tokens in its vocabulary, the engine "
            f"{source.config.vocab_size}",
            hint="Compile the engine with the draft model that belongs to it.",
        )
    if own.keeps_states:
        raise ForgeError(
            "a model with linear attention cannot draft: its states are not those of the tokens that were accepted",
            hint="Draft with another model, or with engine.features.ngram.",
        )
    size = own.tokens_per_block
    tokens = ranks.num_blocks * source.tokens_per_block
    threads = ranks.threads * own.config.parallel.world_size
    return DraftModel(own, RankGroup(own, threads=threads, kv_cache_tokens=-(-tokens // size) * size), feature.tokens)
