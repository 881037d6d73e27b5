"""Evaluation of one request: all its problems, its limits and its memory."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import get_args

from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.formats.attention_windows import attention_windows, partial_window, pools_of, widest_window
from trtforge.formats.llmapi import LlmArgs, applies_windows, require_llm_api, require_mixed_precision
from trtforge.formats.releases import Release
from trtforge.formats.triton import newest_release, target_release
from trtforge.formats.trtllm import CheckpointConfig, Quantization
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.drafting_plan import planned_drafting
from trtforge.models.hf_export_plan import require_format
from trtforge.plan.asked_features import asked_features
from trtforge.plan.budget import budget_problems, experts_problem, least_bits
from trtforge.plan.capacity import with_memory
from trtforge.plan.engine_rules import engine_problems, gpu_problems, link_problems
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.instances import instance_problems
from trtforge.plan.legality import Problem, problems, sort_problems
from trtforge.plan.limits import EngineLimits, derive_limits
from trtforge.plan.model import Model
from trtforge.plan.paged_context import attention_problem, paged_context
from trtforge.plan.peaks import calibration_problems, least_calibration
from trtforge.plan.published import published_problems, served_as_published
from trtforge.plan.request import Request
from trtforge.plan.serving_rules import ServedEngine, limit_problems, serving_problems
from trtforge.plan.speculation import BASES, with_stored_heads
from trtforge.plan.windows import CacheWindows


def evaluate(model: Model, request: Request) -> Evaluation:
    """Evaluate a request. Raises ForgeError for an unknown GPU or release."""
    for_llm_api = request.engine.backend == "llmapi"
    for_embedded, wanted = request.engine.backend == "torch", request.engine.target.tensorrt_llm
    target = newest_release() if for_llm_api else _release(wanted, embedded=for_embedded)
    found = list(_format_problems(model, request))
    try:
        parallel = Parallel(tp=request.tp, pp=request.pp, ep=request.ep)
    except ForgeError as error:
        found.append(Problem("mapping", error.message, error.hint))
        parallel = Parallel(tp=request.tp, pp=request.pp)  # without ep, so that other problems are still found
    layout = _layout(model, request, parallel)
    of_layout = problems(model.family, model.facts, layout) or tuple(_exclusion_problems(model, layout))
    found += of_layout
    warnings: list[str] = []
    checkpoint = _checkpoint(model, request, layout, fits=not of_layout)
    if not for_llm_api:
        embedded = request.for_tensorrt is False
        request = request.with_features(with_stored_heads(request.engine.features, checkpoint, embedded=embedded))
    if request.for_tensorrt is not False:
        of_engine = engine_problems(checkpoint, target, request.gpu, fits=not of_layout)
        sort_problems((_if_for_tensorrt(problem, request) for problem in of_engine), found, warnings)
    sort_problems(asked_features(model, request, checkpoint, target), found, warnings)
    sort_problems(_serving_problems(request, target, parallel, checkpoint), found, warnings)
    if for_llm_api:
        of_api = list(_llm_api_problems(checkpoint, request, parallel))
        if served_as_published(model.config, request.engine.backend, request.quant):
            of_api += published_problems(model.config, request.gpu, request.exclude_modules)
        sort_problems(of_api, found, warnings)
    limits = _limits(checkpoint, request, target, found, warnings)
    if limits is not None and for_embedded:
        of_limits = limit_problems(request.serving, limits.max_batch_size, limits.tokens_per_block)
        sort_problems(of_limits, found, warnings)
    evaluation = Evaluation(request, tuple(found), tuple(warnings), limits)
    if of_layout or limits is None:
        return evaluation
    windows = _windows(request, checkpoint, target, limits)
    if windows is not None and for_llm_api and not applies_windows(model.config.architecture, _version(request)):
        windows = None
    planned = with_memory(model, evaluation, limits, layout, windows)
    return replace(planned, problems=(*planned.problems, *instance_problems(planned)))


def _if_for_tensorrt(problem: Problem, request: Request) -> Problem:
    """A problem of TensorRT-LLM's engine; only a warning if the request's backend is not chosen yet."""
    return problem if request.for_tensorrt else replace(problem, refuses=False)


def _version(request: Request) -> str:
    return request.engine.target.tensorrt_llm


def _windows(
    request: Request, checkpoint: CheckpointConfig, target: Release, limits: EngineLimits
) -> CacheWindows | None:
    """The windows behind which the backend frees blocks of the KV cache; None if it keeps all tokens.

    The embedded engine frees a block of all layers at once, and only with chunked context. If some layers have no
    window, the layers with one get separate blocks, unless blocks are also kept in host memory.
    """
    asked = request.serving.max_attention_window_size
    found, pools = attention_windows(checkpoint), pools_of(target)
    if request.engine.backend == "torch":
        widest = widest_window(checkpoint) if request.engine.features.chunked_context else None
        if partial_window(checkpoint) is not None and not request.serving.kv_cache_host_memory_bytes:
            pools = "full_batch"
        else:
            found, pools = (widest,) * checkpoint.num_hidden_layers, "one"
    elif asked is not None:
        found = tuple(asked[layer % len(asked)] for layer in range(checkpoint.num_hidden_layers))
    if not any(found):
        return None
    longest = limits.max_seq_len + limits.spare_tokens
    layers = tuple(min(window or longest, longest) for window in found)
    return CacheWindows(layers, pools, longest, request.pp) if min(layers) < longest else None


def _serving_problems(
    request: Request, target: Release, parallel: Parallel, checkpoint: CheckpointConfig
) -> Iterator[Problem]:
    backend = request.engine.backend
    if backend == "auto" and request.for_tensorrt:
        backend = "tensorrt_llm"
    if backend != "auto":
        features, layers = request.engine.features, checkpoint.num_hidden_layers
        windows = backend != "llmapi" or applies_windows(checkpoint.architecture, _version(request))
        engine = ServedEngine(backend, target, features, parallel.world_size, layers, windows)
        yield from serving_problems(request.serving, engine)
    if request.serving.cuda_graph_mode:
        message = "serving.cuda_graph_mode: the plan does not include the GPU memory of CUDA graphs, which is unknown"
        yield Problem("serving", message, "Lower serving.kv_cache_fraction if the server needs more.", refuses=False)


def _llm_api_problems(checkpoint: CheckpointConfig, request: Request, parallel: Parallel) -> Iterator[Problem]:
    """Limits of TensorRT-LLM's PyTorch backend, to which the rules of engine builds do not apply."""
    try:
        require_format(checkpoint)
    except ForgeError as error:
        yield Problem("format", error.message, error.hint)
    try:
        require_llm_api(request.engine.target.tensorrt_llm, LlmArgs())
    except ForgeError as error:
        yield Problem("release", error.message, error.hint)
    layers = checkpoint.quantization.quantized_layers or {}
    try:
        require_mixed_precision(request.engine.target.tensorrt_llm, {layer.quant_algo for layer in layers.values()})
    except ForgeError as error:
        yield Problem("mixed_precision", error.message, error.hint)
    if request.engine.max_beam_width > 1:
        message = f"max_beam_width {request.engine.max_beam_width}: the llmapi backend has no beam search"
        yield Problem("limits", message, "Use max_beam_width 1, or backend tensorrt_llm.")
    if request.gpu is not None:
        yield from gpu_problems(request.gpu, WEIGHTS[request.quant], CACHES[request.kv_cache], request.dtype)
        yield from link_problems(request.gpu, parallel)


def _layout(model: Model, request: Request, parallel: Parallel) -> Layout:
    """The layout for conversion; a format that conversion does not support counts as unquantised."""
    layout = Layout(parallel, request.dtype, group_size=request.group_size, exclude_modules=request.exclude_modules)
    for name in get_args(QuantFormat):
        if request.quant == name:
            layout = replace(layout, quant=name)
    if model.stored is not None and request.quant == model.stored.format:
        layout = replace(layout, source=model.stored)
    for name in get_args(KvCacheFormat):
        if request.kv_cache == name:
            layout = replace(layout, kv_cache=name)
    return layout


def _exclusion_problems(model: Model, layout: Layout) -> Iterator[Problem]:
    """Problems of layers excluded in one pipeline stage but not in another: config.json has one list for all stages."""
    try:
        if model.checkpoint is None and (layout.source or layout.exclude_modules):
            checkpoint_config(model.family, model.facts, model.config.architecture, layout)
    except ForgeError as error:
        yield Problem("exclude_modules", error.message, error.hint)


def _format_problems(model: Model, request: Request) -> Iterator[Problem]:
    """Problems of formats that conversion does not write, and of weights that contradict config.json."""
    if model.complaint is not None:
        yield Problem("source", model.complaint.message, model.complaint.hint)
    stored = model.stored
    if stored is not None:
        if request.quant != stored.format:
            said = f"{stored.tool} made it {stored.described}, not {request.quant}"
            message = f"{model.name} is already quantised: {said}"
            yield Problem("format", message, "Keep its format, or plan the original checkpoint.")
        problem = stored.kv_cache_problem(request.kv_cache)
        if problem is not None:
            fix = f"Use --kv-cache {'fp8' if stored.fp8_kv_cache else 'none'}, or the original checkpoint."
            yield Problem("kv_format", f"{model.name} {problem}", fix)
        if request.budget is not None:
            fix = "Leave quantization.budget out, or use the original checkpoint."
            yield Problem("budget", f"{model.name} {stored.budget_problem}", fix)
        for name in stored.formats[1:]:
            if request.gpu is not None and request.engine.backend != "torch":
                yield from gpu_problems(request.gpu, WEIGHTS[name], None, request.dtype)
    elif request.quant not in get_args(QuantFormat):
        message = f"trtforge does not convert to {request.quant} yet"
        yield Problem("format", message, f"Formats: {', '.join(get_args(QuantFormat))}.")
    if request.budget is not None and stored is None:
        yield from _budget_problems(model, request, request.budget)
    limit, measured = request.calibration_memory, (WEIGHTS[request.quant], CACHES[request.kv_cache])
    published = served_as_published(model.config, request.engine.backend, request.quant)
    made = stored is not None or model.checkpoint is not None or published
    calibrates = request.compensated or any(format.calibrated for format in measured)
    if limit is not None and not made and calibrates:
        yield from calibration_problems(calibration_needs(model, request), limit)
    if request.kv_cache not in get_args(KvCacheFormat):
        message = f"trtforge does not convert to an {request.kv_cache.upper()} KV cache yet"
        yield Problem("kv_format", message, f"KV cache formats: {', '.join(get_args(KvCacheFormat))}.")


def _budget_problems(model: Model, request: Request, budget: float) -> Iterator[Problem]:
    experts = experts_problem(model.family, model.facts)
    if experts is not None:
        yield experts
    whole = model.whole(request.dtype)
    try:
        left = model.whole(request.dtype, request.exclude_modules)
    except ForgeError:  # its problem is found elsewhere
        left = whole
    least = least_bits(whole, left, request.group_size)
    yield from budget_problems(budget, request.quant, least, request.pp, request.engine.backend)
    if request.gpu is not None:
        yield from gpu_problems(request.gpu, WEIGHTS["fp8"], None, request.dtype)


def calibration_needs(model: Model, request: Request) -> int:
    """The least bytes of the request's calibration, without the program itself."""
    whole, itemsize = model.whole(request.dtype), dtype_named(request.dtype).size
    wanted, compensated = WEIGHTS[request.quant], request.compensated
    return least_calibration(model.family, model.facts, whole, itemsize, wanted, compensated=compensated)


def _checkpoint(model: Model, request: Request, layout: Layout, *, fits: bool) -> CheckpointConfig:
    """The config.json of the checkpoint; for an illegal layout, without the fields that need a legal one."""
    family, architecture = model.family, model.config.architecture
    if model.checkpoint is not None:
        return model.checkpoint
    if fits:
        return _with_heads(model, request, checkpoint_config(family, model.facts, architecture, layout))
    base = checkpoint_config(family, model.facts, architecture, Layout(Parallel(), layout.dtype))
    quantization = Quantization(
        quant_algo=WEIGHTS[request.quant].algorithm, kv_cache_quant_algo=CACHES[request.kv_cache].algorithm
    )
    return base.model_copy(update={"quantization": quantization, "mapping": layout.parallel.mapping()})


def _with_heads(model: Model, request: Request, checkpoint: CheckpointConfig) -> CheckpointConfig:
    """The config.json with the Medusa heads or EAGLE networks that conversion adds for a TensorRT engine.

    Raises ForgeError if they are of another model.
    """
    features = request.engine.features
    drafting, bases = features.medusa or features.eagle, BASES["medusa" if features.medusa is not None else "eagle"]
    if drafting is None or drafting.model is None or not request.for_tensorrt:
        return checkpoint
    if model.config.architecture not in bases:  # its problem is found elsewhere
        return checkpoint
    return planned_drafting(checkpoint, model.config, drafting, assumed=True)


def _limits(
    checkpoint: CheckpointConfig, request: Request, target: Release, found: list[Problem], warnings: list[str]
) -> EngineLimits | None:
    """The engine's limits; None if they are impossible. Problems and warnings are appended."""
    engine = request.engine
    if request.for_tensorrt is not False:
        paged = paged_context(checkpoint.quantization, engine.features)
        found += paged.problems
        warnings += paged.warnings
        engine = engine.model_copy(update={"features": paged.features})
        attention = attention_problem(checkpoint, paged.features)
        if attention is not None:
            sort_problems([_if_for_tensorrt(attention, request)], found, warnings)
    default = target.field("plugin_config", "tokens_per_block").default
    assert isinstance(default, int)
    try:
        limits = derive_limits(checkpoint, engine, default)
    except ForgeError as error:
        found.append(Problem("limits", error.message, error.hint))
        return None
    warnings += limits.warnings
    return limits


_release = lru_cache(maxsize=None)(target_release)
