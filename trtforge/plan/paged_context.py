"""Paged context FMHA: which quantisations support it; KV reuse and chunked context need it."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from trtforge.core.features import FeaturesConfig
from trtforge.formats.trtllm import CheckpointConfig, Quantization
from trtforge.plan.legality import Problem

FP8_ATTENTION = frozenset({"FP8", "W4A8_AWQ", "NVFP4"})
"""Algorithms whose attention can compute in FP8 (`build()` in tensorrt_llm/builder.py)."""
_NEEDING_IT = ("kv_reuse", "chunked_context")


@dataclass(frozen=True)
class PagedContext:
    """`features` with the unavailable ones off; `problems`: one for each of these that was explicitly requested."""

    features: FeaturesConfig
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()


def has_paged_context(quantization: Quantization) -> bool:
    """Whether an engine has paged context FMHA.

    `build()` turns it off for an INT8 KV cache, and for an FP8 one unless the linear layers are FP8 too.
    """
    cache = quantization.kv_cache_quant_algo
    return cache != "INT8" and (cache != "FP8" or quantization.quant_algo in FP8_ATTENTION)


def uses_paged_context(features: FeaturesConfig) -> bool:
    """Whether an engine with these features is built with paged context FMHA."""
    return features.kv_reuse or features.chunked_context or features.eagle is not None


def attention_problem(checkpoint: CheckpointConfig, features: FeaturesConfig) -> Problem | None:
    """FP8 attention scales its output for attention.dense (`set_fp8_context_fhma`, models/modeling_utils.py).

    `features`: those that the engine can have.
    """
    quantization = checkpoint.quantization
    forced = quantization.quant_algo in FP8_ATTENTION and quantization.kv_cache_quant_algo == "FP8"
    if not forced or not uses_paged_context(features) or not excludes(checkpoint, "attention.dense"):
        return None
    return Problem(
        "exclude_modules",
        "attention.dense is not quantised in some layers: with an FP8 KV cache and paged context TensorRT-LLM "
        "computes attention in FP8, which needs that layer's input scale",
        "Quantise it (exclude_modules without o_proj), use quantization.kv_cache: none, or set "
        "engine.features.kv_reuse and chunked_context to false.",
    )


def excludes(checkpoint: CheckpointConfig, *modules: str) -> bool:
    """Whether one of these modules is excluded from quantisation in some layer."""
    names = [f"transformer.layers.{layer}.{name}" for layer in range(checkpoint.num_hidden_layers) for name in modules]
    patterns = checkpoint.quantization.exclude_modules or ()
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def paged_context(quantization: Quantization, features: FeaturesConfig) -> PagedContext:
    """The features that are possible with or without paged context FMHA, with problems and warnings."""
    wanted = [name for name in _NEEDING_IT if getattr(features, name)]
    if not wanted or has_paged_context(quantization):
        return PagedContext(features)
    algorithm, kv_cache = quantization.quant_algo, quantization.kv_cache_quant_algo
    why = (
        f"TensorRT-LLM has no paged context FMHA for {algorithm or 'unquantised'} linear layers "
        f"with an {kv_cache} KV cache"
    )
    problems = tuple(
        Problem(
            "features",
            f"engine.features.{name} is not available: {why}",
            "Use quantization.kv_cache: none, or format: fp8 with kv_cache: fp8, "
            f"or set engine.features.{name}: false.",
        )
        for name in wanted
        if name in features.model_fields_set
    )
    warning = f"{' and '.join(wanted)} {'is' if len(wanted) == 1 else 'are'} off: {why}."
    off = features.model_copy(update=dict.fromkeys(_NEEDING_IT, False))
    return PagedContext(off, problems, (warning,))
