"""Memory of a deployment and the number of requests that fit, for TensorRT-LLM and the embedded engine."""

from collections.abc import Iterator
from dataclasses import replace

from trtforge.core.dtypes import dtype_named
from trtforge.core.parallel import Parallel
from trtforge.machine.host import Host
from trtforge.machine.processor import Processor
from trtforge.models.checkpoint_plan import Layout
from trtforge.plan.embedded import Embedded
from trtforge.plan.embedded_drafting import draft_warnings
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.feature_memory import (
    cache_problems,
    embedded_cache_problems,
    with_adapter_cache,
    with_features,
)
from trtforge.plan.formats import CACHES
from trtforge.plan.host_blocks import host_block_problems
from trtforge.plan.kv import blocks_of
from trtforge.plan.legality import Problem, sort_problems
from trtforge.plan.limits import EngineLimits
from trtforge.plan.memory import Held, Memory, memory_of, tokens_on, with_pool
from trtforge.plan.model import Model
from trtforge.plan.published import weight_format
from trtforge.plan.request import TYPICAL_OUTPUT, TYPICAL_PROMPT, Request
from trtforge.plan.roofline import Workload
from trtforge.plan.weights import RankWeights, Stored
from trtforge.plan.windows import CacheWindows


def with_memory(
    model: Model, evaluation: Evaluation, limits: EngineLimits, layout: Layout, windows: CacheWindows | None = None
) -> Evaluation:
    """Add the memory, and problems that follow from it, to the `evaluation` of a legal layout.

    `windows`: the sliding windows behind which the backend frees KV blocks.
    """
    request = evaluation.request
    if request.bits is not None:  # the budget covers excluded layers too
        layout = replace(layout, exclude_modules=())
    held = held_by(model, request, model.weights(layout), layout.exclude_modules)
    planned = replace(memory_of(model.facts, held, layout.parallel, limits), windows=windows)
    offloaded = request.serving.kv_cache_host_memory_bytes or 0
    planned = replace(planned, stages=tuple(replace(rank, host=rank.host + offloaded) for rank in planned.stages))
    embedded = Embedded.of(request, Processor.of(Host())) if request.engine.backend == "torch" else None
    more: tuple[Problem, ...] = ()
    if embedded is not None:
        memory = embedded.memory(model, request, layout, planned, limits)
        tokens, window_tokens = embedded.pool_tokens(request, memory, limits)
        if memory.windows is not None and memory.windows.pools == "full_batch" and window_tokens == tokens:
            memory = replace(memory, windows=None)
        memory = with_pool(memory, tokens, window_tokens)
        more = tuple(embedded_cache_problems(memory, model, embedded, request.engine.features))
    else:
        memory, more = _with_features(model, request, held, limits, planned)
    typical = _typical(request.typical, limits)
    result = replace(evaluation, memory=memory, held=held, typical=typical, embedded=embedded)
    found, warnings = list(evaluation.problems), [*evaluation.warnings, *_shortened(request.typical, typical, limits)]
    if embedded is not None:
        warnings += draft_warnings(request.engine.features, request.draft, request.serving)
    sort_problems(host_block_problems(result, model.facts.sizes), found, warnings)
    if memory.kv_tokens > 0:
        found += _pool_problems(result, limits, typical, warnings)
        sort_problems(more, found, warnings)
    elif request.gpu is not None:
        message = (
            f"weights, activations and buffers take {_gb(memory.fullest.fixed)} per GPU and leave no KV cache in the "
            f"{_gb(request.gpu.memory)} of {request.gpu.name}"
        )
        found.append(Problem("memory", message, "Spread the model over more GPUs, or use a smaller format."))
    if model.vision_bytes is None:
        warnings.append(f"the vision part of {model.name} is not in the plan: its size is not known")
    warnings += _cache_warnings(model, request, layout.parallel)
    return replace(result, problems=tuple(found), warnings=tuple(warnings))


def held_by(model: Model, request: Request, ranks: RankWeights | None, excludes: tuple[str, ...] = ()) -> Held:
    """The weights of `ranks`, or of the unsplit model, as the request stores them."""
    whole = model.whole(request.dtype, excludes)
    weights = weight_format(model.config, request.engine.backend, request.quant)
    itemsize = dtype_named(request.dtype).size
    stored = Stored(weights, itemsize, request.group_size, request.bits)
    vision = model.vision_bytes if request.engine.backend != "torch" else 0
    return Held(whole if ranks is None else ranks, whole, stored, CACHES[request.kv_cache], vision or 0)


def _with_features(
    model: Model, request: Request, held: Held, limits: EngineLimits, memory: Memory
) -> tuple[Memory, tuple[Problem, ...]]:
    """Memory on TensorRT-LLM: features, the KV pool in what is left, then the adapter cache."""
    features, facts = request.engine.features, model.facts
    if features.beyond_paging:
        memory = with_features(memory, facts, held, limits, features, request.draft)
    memory = with_pool(memory, _pool_tokens(request, memory, limits))
    memory = with_adapter_cache(memory, facts, held, features, int(request.gpu.memory) if request.gpu else None)
    return memory, tuple(cache_problems(memory, facts, held, features, limits))


def _pool_tokens(request: Request, memory: Memory, limits: EngineLimits) -> int:
    """Tokens of the KV pool: as many as fit the GPU; without a GPU, all concurrent requests at full length."""
    block = limits.tokens_per_block
    length, requests = limits.max_seq_len + limits.spare_tokens, request.concurrency or 1
    if request.gpu is None and memory.windows is not None:
        tokens = memory.windows.tokens_for(requests, length, block)
    elif request.gpu is None:
        tokens = requests * blocks_of(length, block) * block
    else:
        tokens = tokens_on(memory, int(request.gpu.memory), request.serving.kv_cache_fraction, block)
    most = request.serving.kv_cache_tokens
    return tokens if most is None else min(tokens, blocks_of(most, block) * block)


def _pool_problems(
    evaluation: Evaluation, limits: EngineLimits, typical: Workload, warnings: list[str]
) -> Iterator[Problem]:
    """Problems of a pool that is too small for one request of full length, or for the requested concurrency."""
    request, memory = evaluation.request, evaluation.memory
    assert memory is not None
    if limits.max_seq_len + limits.spare_tokens > memory.longest(limits.tokens_per_block):
        message = (
            f"the KV pool of {memory.kv_tokens} tokens is too small for one request of max_seq_len {limits.max_seq_len}"
        )
        if request.engine.max_seq_len is not None:
            yield Problem("kv_pool", message, "Lower max_seq_len, or make room for a larger pool.")
        else:
            warnings.append(f"{message}, the model's context length: prompts that do not fit are refused.")
    fits = evaluation.typical_requests or 0
    if fits == 0:
        message = f"the KV pool of {memory.kv_tokens} tokens is too small for one request of {typical.length} tokens"
        yield Problem("kv_pool", message, "Make room for a larger pool.")
    elif request.concurrency is not None and request.concurrency > fits:
        message = (
            f"the KV pool of {memory.kv_tokens} tokens has room for {fits} requests of {typical.length} tokens at "
            f"once, not {request.concurrency}"
        )
        yield Problem("concurrency", message, "Lower --concurrency, or make room for a larger pool.")


def _cache_warnings(model: Model, request: Request, parallel: Parallel) -> Iterator[str]:
    kv_heads = model.facts.sizes.num_kv_heads
    if parallel.tp > kv_heads:
        yield f"{kv_heads} KV heads at tp {parallel.tp}: each is stored {parallel.tp // kv_heads} times."
    biased = "qkv_bias" in model.facts.holding and "qk_norm" not in model.facts.holding
    if request.kv_cache != "none" and biased:
        yield (
            f"an {request.kv_cache} KV cache loses accuracy with {model.family.name}'s attention biases (TensorRT-LLM "
            "issue #4218): let the quality gate decide."
        )


def _typical(workload: Workload, limits: EngineLimits) -> Workload:
    """The workload clamped to the engine's limits."""
    output = max(1, min(workload.output, limits.max_seq_len // 2))
    prompt = max(1, min(workload.prompt, limits.longest_prompt, limits.max_seq_len - output))
    return Workload(prompt, output)


def _shortened(asked: Workload, planned: Workload, limits: EngineLimits) -> Iterator[str]:
    """A warning if the user gave a workload that exceeds the engine's limits; none for the default workload."""
    if asked == Workload(TYPICAL_PROMPT, TYPICAL_OUTPUT):
        return
    instead = f"prompts of {planned.prompt:,} and answers of {planned.output:,} are planned."
    if asked.prompt > limits.longest_prompt:
        yield f"prompts of {asked.prompt:,} tokens are refused, the longest have {limits.longest_prompt:,}: {instead}"
    elif asked.length > limits.max_seq_len:
        yield (
            f"prompts of {asked.prompt:,} and answers of {asked.output:,} tokens are longer than max_seq_len "
            f"{limits.max_seq_len:,}: {instead}"
        )


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
