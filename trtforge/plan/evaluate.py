"""One request judged: every reason why it cannot be, what it keeps in memory, and how long its prompts may be."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.processor import Processor
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.formats.releases import Release, release
from trtforge.formats.triton import newest_release
from trtforge.formats.trtllm import CheckpointConfig, Quantization
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.hf_plan import require_format
from trtforge.models.plan import Layout
from trtforge.plan.asked_features import asked_features
from trtforge.plan.embedded import Embedded
from trtforge.plan.engine_rules import engine_problems, gpu_problems, link_problems
from trtforge.plan.feature_memory import cache_problems, with_adapter_cache, with_features
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.kv import blocks_of, requests_that_fit
from trtforge.plan.legality import Problem, problems
from trtforge.plan.limits import Limits, derive_limits, has_paged_context
from trtforge.plan.memory import Held, Memory, memory_of, tokens_on, with_pool
from trtforge.plan.model import Model
from trtforge.plan.peaks import calibration_problems
from trtforge.plan.request import Request
from trtforge.plan.roofline import Roofline, Workload
from trtforge.plan.weights import Stored


@dataclass(frozen=True)
class Evaluation:
    """What is known of a request. `memory` is None where the layout itself cannot be, `limits` where they cannot.

    `typical`: the typical request, cut to what the engine takes. `embedded`: how the embedded engine computes, where
    that is the backend.
    """

    request: Request
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    limits: Limits | None = None
    memory: Memory | None = None
    held: Held | None = None
    typical: Workload | None = None
    embedded: Embedded | None = None

    @property
    def legal(self) -> bool:
        """Whether there is no reason against it."""
        return not self.problems

    @property
    def full_length_requests(self) -> int | None:
        """Requests of max_seq_len tokens that the KV pool holds at once."""
        return self._requests(self.limits.max_seq_len) if self.limits else None

    @property
    def typical_requests(self) -> int | None:
        """Requests of typical length that the KV pool holds at once."""
        return self._requests(self.typical.length) if self.typical else None

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt: it must leave room for an answer in the engine and in the KV pool."""
        if self.limits is None or self.memory is None:
            return None if self.limits is None else self.limits.longest_prompt
        return max(0, min(self.limits.longest_prompt, self.memory.kv_tokens - 1))

    def roofline(self, model: Model) -> Roofline | None:
        """The time model, where there is a GPU and it is legal."""
        gpu = self.request.gpu
        if not self.legal or gpu is None or self.held is None or self.limits is None or self.memory is None:
            return None
        return Roofline(model.facts, self.held, self.memory.parallel, gpu, self.limits.max_num_tokens)

    def _requests(self, length: int) -> int | None:
        if self.limits is None or self.memory is None:
            return None
        return requests_that_fit(self.memory.kv_tokens, length + self.limits.spare_tokens, self.limits.tokens_per_block)


def evaluate(model: Model, request: Request) -> Evaluation:
    """Judge a request. Raises ForgeError for a GPU or a release that nobody knows."""
    for_llm_api = request.engine.backend == "llmapi"
    target = newest_release() if for_llm_api else _release(request.engine.target.tensorrt_llm)
    found = list(_format_problems(model, request))
    try:
        parallel = Parallel(tp=request.tp, pp=request.pp, ep=request.ep)
    except ForgeError as error:
        found.append(Problem("mapping", error.message, error.hint))
        parallel = Parallel(tp=request.tp, pp=request.pp)  # what else is wrong shows without the experts' groups
    layout = _layout(model, request, parallel)
    of_layout = problems(model.family, model.facts, layout) or tuple(_exclusion_problems(model, layout))
    found += of_layout
    warnings: list[str] = []
    if request.for_tensorrt is not False:
        for problem in engine_problems(model, request, target, parallel, fits=not of_layout):
            if problem.refuses and request.for_tensorrt:
                found.append(problem)
            else:
                warnings.append(f"{problem.message}. {problem.fix}")
    checkpoint = _checkpoint(model, request, layout)
    for problem in asked_features(model, request, checkpoint, target):
        if problem.refuses:
            found.append(problem)
        else:
            warnings.append(f"{problem.message}. {problem.fix}")
    if for_llm_api:
        found += _llm_api_problems(checkpoint, request, parallel)
    limits = _limits(checkpoint, request, target, found, warnings)
    evaluation = Evaluation(request, tuple(found), tuple(warnings), limits)
    if of_layout or limits is None:
        return evaluation
    return _with_memory(model, evaluation, limits, layout)


def _llm_api_problems(checkpoint: CheckpointConfig, request: Request, parallel: Parallel) -> Iterator[Problem]:
    """What TensorRT-LLM's PyTorch backend lacks; the rules of engine builds do not hold there."""
    try:
        require_format(checkpoint)
    except ForgeError as error:
        yield Problem("format", error.message, error.hint)
    if request.gpu is not None:
        yield from gpu_problems(request.gpu, WEIGHTS[request.quant], CACHES[request.kv_cache], request.dtype)
        yield from link_problems(request.gpu, parallel)


def _layout(model: Model, request: Request, parallel: Parallel) -> Layout:
    """The layout as conversion knows it; a format that it does not know leaves the weights as they are."""
    layout = Layout(parallel, request.dtype, group_size=request.group_size, exclude_modules=request.exclude_modules)
    if model.stored is not None and request.quant == model.stored.format:
        return replace(layout, quant=model.stored.format, source=model.stored)
    for name in get_args(QuantFormat):
        if request.quant == name:
            layout = replace(layout, quant=name)
    for name in get_args(KvCacheFormat):
        if request.kv_cache == name:
            layout = replace(layout, kv_cache=name)
    return layout


def _exclusion_problems(model: Model, layout: Layout) -> Iterator[Problem]:
    """Layers that are left in one pipeline stage and not in another: config.json has one list for all."""
    try:
        if layout.source or layout.exclude_modules:
            checkpoint_config(model.family, model.facts, model.config.architecture, layout)
    except ForgeError as error:
        yield Problem("exclude_modules", error.message, error.hint)


def _format_problems(model: Model, request: Request) -> Iterator[Problem]:
    """What conversion does not write, and weights that are not what config.json says."""
    if model.complaint is not None:
        yield Problem("source", model.complaint.message, model.complaint.hint)
    stored = model.stored
    if stored is not None:
        if request.quant != stored.format:
            message = f"{model.name} is already quantised: {stored.tool} made it {stored.format}, not {request.quant}"
            yield Problem("format", message, "Keep its format, or plan the original checkpoint.")
    elif request.quant not in get_args(QuantFormat):
        message = f"trtforge does not convert to {request.quant} yet"
        yield Problem("format", message, f"Formats: {', '.join(get_args(QuantFormat))}.")
    limit, measured = request.calibration_memory, (WEIGHTS[request.quant], CACHES[request.kv_cache])
    if limit is not None and stored is None and any(format.calibrated for format in measured):
        yield from calibration_problems(model.whole(request.dtype), dtype_named(request.dtype).size, limit)
    if request.kv_cache not in get_args(KvCacheFormat):
        message = f"trtforge does not convert to an {request.kv_cache.upper()} KV cache yet"
        yield Problem("kv_format", message, f"KV cache formats: {', '.join(get_args(KvCacheFormat))}.")


def _checkpoint(model: Model, request: Request, layout: Layout) -> CheckpointConfig:
    plain = Layout(Parallel(), layout.dtype)
    base = checkpoint_config(model.family, model.facts, model.config.architecture, plain)
    quantization = Quantization(
        quant_algo=WEIGHTS[request.quant].algorithm, kv_cache_quant_algo=CACHES[request.kv_cache].algorithm
    )
    return base.model_copy(update={"quantization": quantization, "mapping": layout.parallel.mapping()})


def _limits(
    checkpoint: CheckpointConfig, request: Request, target: Release, found: list[Problem], warnings: list[str]
) -> Limits | None:
    """The engine's limits; what cannot be goes to `found`."""
    engine = request.engine
    if request.for_tensorrt is not False and not has_paged_context(checkpoint.quantization):
        features = engine.features
        why = f"TensorRT-LLM has no paged context FMHA for {request.quant} weights with an {request.kv_cache} KV cache"
        for name in ("kv_reuse", "chunked_context"):
            if getattr(features, name) and name in features.model_fields_set:
                found.append(Problem("features", f"engine.features.{name} cannot be had: {why}", f"Set {name}: false."))
        warnings.append(f"kv_reuse and chunked_context are off: {why}.")
        off = features.model_copy(update={"kv_reuse": False, "chunked_context": False})
        engine = engine.model_copy(update={"features": off})
    default = target.field("plugin_config", "tokens_per_block").default
    assert isinstance(default, int)
    try:
        limits = derive_limits(checkpoint, engine, default)
    except ForgeError as error:
        found.append(Problem("limits", error.message, error.hint))
        return None
    warnings += limits.warnings
    return limits


def _with_memory(model: Model, evaluation: Evaluation, limits: Limits, layout: Layout) -> Evaluation:
    request = evaluation.request
    itemsize = dtype_named(request.dtype).size
    stored = Stored(WEIGHTS[request.quant], itemsize, request.group_size)
    whole = model.whole(request.dtype, layout.exclude_modules)
    held = Held(model.weights(layout), whole, stored, CACHES[request.kv_cache])
    planned = memory_of(model.facts, held, layout.parallel, limits)
    embedded = Embedded.of(request, Processor.here()) if request.engine.backend == "torch" else None
    more: tuple[Problem, ...] = ()
    if embedded is not None:
        memory = embedded.memory(model, request, layout, planned)
        memory = with_pool(memory, embedded.pool_tokens(request, memory, limits))
    else:
        memory, more = _with_features(model, request, held, limits, planned)
    typical = _typical(request.typical, limits)
    result = replace(evaluation, memory=memory, held=held, typical=typical, embedded=embedded)
    found, warnings = list(evaluation.problems), list(evaluation.warnings)
    if memory.kv_tokens > 0:
        found += [*_pool_problems(result, limits, typical, warnings), *more]
    elif request.gpu is not None:
        message = (
            f"{_gb(memory.fullest.fixed)} of weights, activations and buffers a GPU leave no KV cache in the "
            f"{_gb(request.gpu.memory)} of {request.gpu.name}"
        )
        found.append(Problem("memory", message, "Spread the model over more GPUs, or use a smaller format."))
    warnings += _cache_warnings(model, request, layout.parallel)
    return replace(result, problems=tuple(found), warnings=tuple(warnings))


def _with_features(
    model: Model, request: Request, held: Held, limits: Limits, memory: Memory
) -> tuple[Memory, tuple[Problem, ...]]:
    """TensorRT-LLM's memory: what features need, the KV pool in what is left, and adapters beside it."""
    features, facts = request.engine.features, model.facts
    if features.beyond_paging:
        memory = with_features(memory, facts, held, limits, features, request.draft)
    memory = with_pool(memory, _pool_tokens(request, memory, limits))
    memory = with_adapter_cache(memory, facts, held, features, int(request.gpu.memory) if request.gpu else None)
    return memory, tuple(cache_problems(memory, facts, held, features, limits))


def _pool_tokens(request: Request, memory: Memory, limits: Limits) -> int:
    """Tokens of the pool that the GPU has room for; without a GPU, of one that holds the requests at full length."""
    block = limits.tokens_per_block
    if request.gpu is None:
        tokens = (request.concurrency or 1) * blocks_of(limits.max_seq_len + limits.spare_tokens, block) * block
    else:
        tokens = tokens_on(memory, int(request.gpu.memory), request.serving.kv_cache_fraction, block)
    most = request.serving.kv_cache_tokens
    return tokens if most is None else min(tokens, blocks_of(most, block) * block)


def _pool_problems(evaluation: Evaluation, limits: Limits, typical: Workload, warnings: list[str]) -> Iterator[Problem]:
    """A pool that is too small: for one request of full length, for the requests that are to run at once."""
    request, memory = evaluation.request, evaluation.memory
    assert memory is not None
    if limits.max_seq_len + limits.spare_tokens > memory.kv_tokens:
        message = (
            f"the KV pool of {memory.kv_tokens} tokens does not hold one request of max_seq_len {limits.max_seq_len}"
        )
        if request.engine.max_seq_len is not None:
            yield Problem("kv_pool", message, "Lower max_seq_len, or make room for a larger pool.")
        else:
            warnings.append(f"{message}, what the model is made for: such prompts are refused.")
    fits = evaluation.typical_requests or 0
    if fits == 0:
        message = f"the KV pool of {memory.kv_tokens} tokens does not hold one request of {typical.length} tokens"
        yield Problem("kv_pool", message, "Make room for a larger pool.")
    elif request.concurrency is not None and request.concurrency > fits:
        message = (
            f"the KV pool of {memory.kv_tokens} tokens holds {fits} requests of {typical.length} tokens at once, "
            f"not {request.concurrency}"
        )
        yield Problem("concurrency", message, "Lower --concurrency, or make room for a larger pool.")


def _cache_warnings(model: Model, request: Request, parallel: Parallel) -> Iterator[str]:
    kv_heads = model.facts.sizes.num_kv_heads
    if parallel.tp > kv_heads:
        yield f"{kv_heads} KV heads on tp {parallel.tp}: each is kept {parallel.tp // kv_heads} times."
    biased = "qkv_bias" in model.facts.holding and "qk_norm" not in model.facts.holding
    if request.kv_cache != "none" and biased:
        yield (
            f"an {request.kv_cache} KV cache loses accuracy with {model.family.name}'s attention biases (TensorRT-LLM "
            "issue #4218): let the quality gate decide."
        )


def _typical(workload: Workload, limits: Limits) -> Workload:
    """The workload cut to the engine's limits: the prompt first."""
    output = max(1, min(workload.output, limits.max_seq_len // 2))
    prompt = max(1, min(workload.prompt, limits.longest_prompt, limits.max_seq_len - output))
    return Workload(prompt, output)


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


_release = lru_cache(maxsize=None)(release)
