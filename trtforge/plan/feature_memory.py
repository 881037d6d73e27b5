"""Memory that features add or offload: draft models, LoRA adapters, prompt tables, context logits, streamed weights."""

from collections.abc import Iterator
from dataclasses import replace

from trtforge.core.dtypes import dtype_named
from trtforge.core.features import FeaturesConfig, LoraFeature
from trtforge.core.figures import size
from trtforge.machine.host import Host
from trtforge.machine.memory import read_memory
from trtforge.models.family import Facts
from trtforge.plan.drafting import Target, drafter
from trtforge.plan.embedded import Embedded
from trtforge.plan.legality import Problem
from trtforge.plan.limits import EngineLimits
from trtforge.plan.lora import adapter_bytes, cache_bytes, embedded_bytes, workspace_bytes
from trtforge.plan.memory import Held, Memory, RankMemory, logits_bytes
from trtforge.plan.model import Model


def with_features(
    memory: Memory, facts: Facts, held: Held, limits: EngineLimits, features: FeaturesConfig, draft: Model | None
) -> Memory:
    """`memory` with the features except the adapter cache; `features.lora` is resolved.

    Context logits take a float32 row for each token of the largest step. Streamed weights are in host memory.
    """
    parallel, itemsize = memory.parallel, held.stored.itemsize
    target = Target(facts, held.ranks, parallel, limits, itemsize, held.cache_itemsize)
    stages: list[RankMemory] = []
    for stage, rank in enumerate(memory.stages):
        drafts = drafter(features, draft, target, stage)
        streamed = rank.weights - int(rank.weights * features.weights_on_gpu)
        prompts = features.context_logits and stage == parallel.pp - 1
        lora, table_rows = features.lora, features.max_prompt_embedding_table_size if stage == 0 else 0
        stages.append(
            replace(
                rank,
                weights=rank.weights - streamed,
                streamed=streamed,
                draft=drafts.fixed,
                tables=table_rows * facts.sizes.hidden * itemsize,
                logits=rank.logits + (logits_bytes(facts.sizes.vocab, limits.max_num_tokens) if prompts else 0),
                lora=workspace_bytes(lora, limits.max_num_tokens, itemsize) if lora else 0,
                host=rank.host + streamed + (lora.host_memory if lora else 0),
                kv_per_token=rank.kv_per_token + drafts.kv_per_token,
            )
        )
    return replace(memory, stages=tuple(stages))


def with_adapter_cache(
    memory: Memory, facts: Facts, held: Held, features: FeaturesConfig, gpu_memory: int | None
) -> Memory:
    """`memory` with the GPU's adapter cache: a share of the `gpu_memory` that engine and KV pool leave.

    Without a GPU, it has the size of one adapter of the largest rank.
    """
    lora = features.lora
    if lora is None:
        return memory
    least = adapter_bytes(facts.sizes, memory.parallel, lora, held.stored.itemsize)
    stages = tuple(
        replace(rank, lora=rank.lora + (least if gpu_memory is None else cache_bytes(lora, gpu_memory - rank.total)))
        for rank in memory.stages
    )
    return replace(memory, stages=stages)


def cache_problems(
    memory: Memory, facts: Facts, held: Held, features: FeaturesConfig, limits: EngineLimits
) -> Iterator[Problem]:
    """Problems of adapter caches that are too small for one adapter.

    The server would fail with `Not enough space allocated to ... LoRA cache to hold 1 max sized LoRA`.
    """
    lora = features.lora
    if lora is None:
        return
    itemsize = held.stored.itemsize
    least = adapter_bytes(facts.sizes, memory.parallel, lora, itemsize)
    smallest = min(rank.lora for rank in memory.stages) - workspace_bytes(lora, limits.max_num_tokens, itemsize)
    if smallest < least:
        message = (
            f"the GPU's adapter cache of {size(smallest)} is too small: an adapter of rank {lora.max_rank} takes "
            f"{size(least)}"
        )
        share = min(0.99, -(-100 * lora.gpu_fraction * least // max(1, smallest)) / 100)
        fix = f"Use engine.features.lora.gpu_fraction {share:g}, or a lower serving.kv_cache_fraction."
        yield Problem("lora_cache", message, fix)
    yield from _host_problems(lora, least)


def embedded_cache_problems(
    memory: Memory, model: Model, embedded: Embedded, features: FeaturesConfig
) -> Iterator[Problem]:
    """Problems of the embedded engine's memory for adapters.

    More than this machine has is only a warning, as another machine may serve.
    """
    lora = features.lora
    if lora is None:
        return
    itemsize = dtype_named(embedded.compute_dtype).size
    yield from _host_problems(lora, embedded_bytes(model.family, model.facts.sizes, memory.parallel, lora, itemsize))
    there = read_memory(Host()) if embedded.device == "cpu" else None
    needed = memory.over_all("total")
    if there is not None and needed > there.most >= needed - memory.over_all("lora"):
        message = (
            f"engine.features.lora.host_memory: with all its adapters the engine needs {needed:,} bytes of memory, "
            f"this machine has {there.most:,}"
        )
        yield Problem("lora_cache", message, "Lower it, or serve on a machine with more.", refuses=False)


def _host_problems(lora: LoraFeature, least: int) -> Iterator[Problem]:
    """`least`: bytes of one adapter of the largest rank."""
    if lora.host_memory < least:
        message = (
            f"the host's adapter cache of {size(lora.host_memory)} is too small: an adapter of rank {lora.max_rank} "
            f"takes {size(least)}"
        )
        yield Problem("lora_cache", message, f"Use engine.features.lora.host_memory {least} or more.")
