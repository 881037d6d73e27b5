"""Memory of drafters beside the embedded engine: a draft model's engine, Medusa heads or an EAGLE network.

TensorRT-LLM's own speculation is in `drafting`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import dtype_named
from trtforge.core.features import DraftFeature, EagleFeature, FeaturesConfig, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature
from trtforge.core.parallel import Parallel
from trtforge.core.places import artifact_at
from trtforge.core.serving import ServingConfig
from trtforge.formats.eagle import network_numbers
from trtforge.formats.hf import CONFIG
from trtforge.formats.medusa import MEDUSA_FILE, read_medusa
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import CONFIG_FILE, rank_file, read_engine_config
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.medusa_plan import require_heads
from trtforge.plan.checkpoint_model import cached_sizes
from trtforge.plan.drafting import Drafter, Target, eagle3_bytes, eagle_bytes, medusa_bytes
from trtforge.plan.kv import bytes_per_token, cached_layers
from trtforge.plan.model import Model
from trtforge.plan.weights import RankWeights

SizeOf = Callable[[RankWeights], int]
"""Computes the bytes of an unquantised model's weights in an engine."""


def embedded_drafter(
    features: FeaturesConfig, draft: Model | None, target: Target, device: UsableDevice, size_of: SizeOf
) -> Drafter:
    """The memory that drafting adds to a rank; 0 for methods without weights. `draft`: the draft model, if one is
    named.

    Heads and an EAGLE network are beside rank 0, each rank of a draft model beside the engine's rank of the same index.
    On a CPU all ranks share the memory, so each counts an equal part; on a GPU the largest rank counts. Raises
    ForgeError for damaged files.
    """
    if features.draft is not None:
        ranks = tuple(_draft_ranks(features.draft, draft, target, size_of))
    elif features.medusa is not None:
        ranks = (Drafter(_heads(features.medusa, target)),)
    else:
        found = features.eagle3 or features.eagle
        ranks = (_network(found, target),) if found is not None and found.model is not None else ()
    weights, tokens = [each.weights for each in ranks], [each.kv_per_token for each in ranks]
    if device == "cpu":
        world = target.parallel.world_size
        return Drafter(weights=-(-sum(weights) // world), kv_per_token=-(-sum(tokens) // world))
    return Drafter(weights=max(weights, default=0), kv_per_token=max(tokens, default=0))


def with_served_draft(features: FeaturesConfig, serving: ServingConfig) -> FeaturesConfig:
    """The features with a served draft engine as `draft`, so that its memory is planned with the engine's.

    Both engines have a KV cache of `serving.kv_cache_tokens`.
    """
    if serving.draft_engine is None or features.of_torch is not None:
        return features
    return features.model_copy(
        update={"draft": DraftFeature(engine=str(artifact_at(Path(serving.draft_engine), "engine")))}
    )


def draft_warnings(features: FeaturesConfig, draft: Model | None, serving: ServingConfig) -> Iterator[str]:
    """Warnings about drafters that are not in the plan, because their sizes are unknown."""
    asked, served = features.draft, with_served_draft(features, serving).draft
    if served is not asked and served is not None and not _compiled(served.engine):
        yield f"the draft engine is not in the plan: there is no engine in {serving.draft_engine} yet."
    if asked is not None and asked.engine is not None and draft is None and not _compiled(asked.engine):
        yield (
            f"the draft model is not in the plan: there is no engine in {asked.engine} yet. Name the model with "
            "engine.features.draft.model."
        )


def _compiled(engine: str | None) -> bool:
    return engine is not None and all((Path(engine) / name).is_file() for name in (CONFIG_FILE, rank_file(0)))


def _draft_ranks(asked: DraftFeature, draft: Model | None, target: Target, size_of: SizeOf) -> Iterator[Drafter]:
    """The ranks of the draft model: those of its engine or, if it is not compiled yet, one of the unquantised model."""
    if asked.engine is not None and _compiled(asked.engine):
        directory = Path(asked.engine)
        config, values = read_engine_config(directory)
        dtype = str(values.get("forge", {}).get("compute_dtype", config.dtype))
        itemsize = dtype_named(dtype).size if config.quantization.kv_cache_quant_algo is None else 1
        one = bytes_per_token(cached_sizes(config), itemsize, config.parallel)
        for rank in config.parallel.ranks:
            yield Drafter(sum(stored.spec.nbytes for stored in read_header(directory / rank_file(rank.index))), one)
    elif draft is not None:
        layout = Layout(Parallel(), "bfloat16" if target.itemsize == 2 else "float32")
        one = bytes_per_token(draft.facts.sizes, target.itemsize)
        yield Drafter(size_of(draft.weights(layout)), one)


def _heads(asked: MedusaFeature, target: Target) -> int:
    """Bytes of the Medusa heads that are used; no others are loaded."""
    if asked.model is None:
        return 0
    sizes, directory = target.facts.sizes, Path(asked.model)
    if (directory / MEDUSA_FILE).is_file():
        found = read_medusa(directory, sizes.hidden, sizes.vocab)
        require_heads(asked, found.heads, found.layers, str(directory / MEDUSA_FILE))
        return found.numbers(asked.used_heads) * target.itemsize
    expected = asked.model_copy(update={"heads": asked.used_heads})
    return medusa_bytes(sizes, Parallel(), expected, target.itemsize)


def _network(asked: Eagle3Feature | EagleFeature, target: Target) -> Drafter:
    """An EAGLE network; if its files do not exist yet, one layer of the target's sizes is assumed.

    The layer's KV cache has the compute dtype, and spare blocks for the draft tokens of a full batch
    (runtime/decoder/eagle.py, `spare_blocks`).
    """
    assert asked.model is not None, "see embedded_drafter"
    limits, directory = target.limits, Path(asked.model)
    if (directory / CONFIG).is_file():
        numbers, cached = network_numbers(directory)
        weights, one = numbers * target.itemsize, cached * target.itemsize
    else:
        whole = replace(target, parallel=Parallel())
        weights = eagle3_bytes(whole) if isinstance(asked, Eagle3Feature) else eagle_bytes(whole)
        one = bytes_per_token(target.facts.sizes, target.itemsize) // cached_layers(target.facts.sizes, Parallel())
    block = limits.tokens_per_block
    spare = limits.max_batch_size * -(-asked.most_written // block) * block
    return Drafter(weights=weights + spare * one, kv_per_token=one)
