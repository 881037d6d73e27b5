"""Creates an engine's drafter from its speculation feature and the files next to its ranks."""

from dataclasses import replace

from trtforge.core.errors import ForgeError
from trtforge.core.features import DraftFeature, EagleFeature, LookaheadFeature, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature, NgramFeature
from trtforge.formats.eagle import EAGLE_DIRECTORY, read_eagle
from trtforge.formats.medusa import MEDUSA_DIRECTORY, read_medusa
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import DRAFT_ENGINE, rank_file
from trtforge.runtime.decoder.kv_capacity import KvMemory, block_bytes
from trtforge.runtime.draft_model import DraftModel
from trtforge.runtime.drafting import Drafter, NgramDrafter, Speculation
from trtforge.runtime.eagle import EagleDrafter
from trtforge.runtime.linears.kernels import DTYPES
from trtforge.runtime.lookahead import LookaheadDrafter
from trtforge.runtime.medusa import MedusaDrafter
from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.rank_model import placement_of
from trtforge.runtime.ranks.source import DrafterBytes, EagleDrafts, Source, open_engine
from trtforge.runtime.scheduling.draft_trees import TreeShape


def with_drafter(source: Source, feature: Speculation | None) -> Source:
    """`source` with the drafter of `feature`: an EAGLE network, or the bytes of Medusa heads or a draft model.

    Raises ForgeError if the drafter is damaged.
    """
    if isinstance(feature, MedusaFeature):
        sizes = source.config.hidden_size, source.config.vocab_size
        numbers = read_medusa(source.directory / MEDUSA_DIRECTORY, *sizes).numbers(feature.used_heads)
        return replace(source, beside=(DrafterBytes(numbers * DTYPES[source.forge.compute_dtype].itemsize),))
    if isinstance(feature, DraftFeature):
        own = open_engine(source.directory / DRAFT_ENGINE)
        ranks = own.config.parallel.ranks
        return replace(source, beside=tuple(_draft_rank(own, rank.index, source) for rank in ranks))
    if not isinstance(feature, Eagle3Feature | EagleFeature):
        return source
    first = isinstance(feature, EagleFeature)
    network = read_eagle(source.directory / EAGLE_DIRECTORY, "eagle" if first else "eagle3", source.config)
    choices = feature.choices if isinstance(feature, EagleFeature) else None
    shape = TreeShape.chain(feature.most_drafted) if choices is None else TreeShape.of(choices)
    return replace(source, eagle=EagleDrafts(network, shape))


def require_draft_model(*, keeps_states: bool) -> None:
    """Raises ForgeError for a draft model with linear attention: its states cannot return to an earlier token."""
    if keeps_states:
        raise ForgeError(
            "a model with linear attention cannot draft: its states cannot be set back to the accepted tokens",
            hint="Draft with another model, or with engine.features.ngram.",
        )


def _draft_rank(own: Source, index: int, source: Source) -> DrafterBytes:
    """Memory of rank `index` of a draft model whose KV cache has as many tokens as the cache of `source`."""
    stored = read_header(own.directory / rank_file(index))
    block = block_bytes(own.spec(index), DTYPES[own.forge.compute_dtype], own.tokens_per_block)
    tokens = -(-block * source.tokens_per_block // own.tokens_per_block)
    return DrafterBytes(sum(tensor.spec.nbytes for tensor in stored), tokens)


def open_drafter(feature: Speculation | None, source: Source, ranks: RankGroup) -> Drafter | None:
    """The drafter of the engine `source` on `ranks`; None without speculation. Raises ForgeError if it is damaged.

    A draft model's KV cache has as many tokens as the engine's on its device, and none in host memory.
    """
    if feature is None or isinstance(feature, NgramFeature):
        return None if feature is None else NgramDrafter(feature)
    if isinstance(feature, LookaheadFeature):
        return LookaheadDrafter(feature)
    if isinstance(feature, MedusaFeature):
        sizes = source.config.hidden_size, source.config.vocab_size
        place = placement_of(source, 0)
        return MedusaDrafter(source.directory / MEDUSA_DIRECTORY, sizes, feature, place, ranks)
    if isinstance(feature, Eagle3Feature | EagleFeature):
        assert source.eagle is not None, "see with_drafter"
        most = feature.max_requests if isinstance(feature, Eagle3Feature) else None
        return EagleDrafter(ranks, source.eagle.shape, source.tokens_per_block, most)
    own = open_engine(source.directory / DRAFT_ENGINE)
    if own.config.vocab_size != source.config.vocab_size:
        raise ForgeError(
            f"the draft model has {own.config.vocab_size} tokens in its vocabulary, the engine "
            f"{source.config.vocab_size}",
            hint="Compile the engine with the draft model that belongs to it.",
        )
    require_draft_model(keeps_states=own.keeps_states)
    size = own.tokens_per_block
    tokens = ranks.num_blocks * source.tokens_per_block
    threads = ranks.threads * own.config.parallel.world_size
    own_ranks = RankGroup(own, threads=threads, memory=KvMemory(tokens=-(-tokens // size) * size))
    return DraftModel(own, own_ranks, feature.tokens)
