"""The features that an engine will have: what is asked for, resolved, checked against one another and the release."""

from collections.abc import Iterable

from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.recipe import EngineConfig
from trtforge.formats.adapter import resolved_features
from trtforge.formats.releases import Release
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.feature_rules import drafting_problems, feature_problems
from trtforge.plan.legality import Problem
from trtforge.plan.limits import EngineLimits, has_paged_context


def built_features(
    checkpoint: CheckpointConfig, engine: EngineConfig, release: Release, warnings: list[str]
) -> FeaturesConfig:
    """The features as an engine keeps them: no path in it. What only speaks against one is added to `warnings`.

    Raises ForgeError for a feature that is asked for by name and cannot be had.
    """
    features = resolved_features(_paging(checkpoint, engine.features, warnings))
    wanted = engine.model_copy(update={"features": features})
    _require(drafting_problems(checkpoint, wanted), warnings)
    _require(feature_problems(checkpoint, wanted, release), warnings)
    return features


def feature_notes(asked: FeaturesConfig, features: FeaturesConfig, limits: EngineLimits) -> list[str]:
    """What `build()` does by itself for a feature, or what follows from it."""
    notes: list[str] = []
    if limits.speculation is not None:
        method, draft = limits.speculation.method, limits.speculation.draft_tokens
        layers = f" and {limits.speculation.depth} for EAGLE's layers" if limits.speculation.depth else ""
        notes.append(
            f"trtllm-build adds {draft} to max_seq_len for draft tokens{layers}: requests keep the lengths given here."
        )
        if limits.max_num_tokens == limits.max_batch_size * limits.verified_tokens:
            notes.append(
                f"max_num_tokens is {limits.max_num_tokens}: with {method} a step verifies {limits.verified_tokens} "
                f"tokens for each of {limits.max_batch_size} requests."
            )
    if features.eagle is not None and not (features.kv_reuse or features.chunked_context):
        notes.append("use_paged_context_fmha is on: EAGLE needs it.")
    if features.lora is not None:
        given = asked.lora.modules if asked.lora is not None else ()
        added = [module for module in features.lora.modules if given and module not in given]
        if added:
            notes.append(f"{' and '.join(added)}: added, for query, key and value take LoRA together.")
    if features.multiple_profiles:
        notes.append("opt_num_tokens stays open: with multiple_profiles each profile has its own.")
    if features.weights_on_gpu < 1:
        notes.append("gemm_plugin is off: weights that a plugin holds do not stream.")
    return notes


def _paging(checkpoint: CheckpointConfig, features: FeaturesConfig, warnings: list[str]) -> FeaturesConfig:
    """KV reuse and chunked context both need paged context FMHA."""
    algorithm, kv_cache = checkpoint.quantization.quant_algo, checkpoint.quantization.kv_cache_quant_algo
    wanted = [name for name in ("kv_reuse", "chunked_context") if getattr(features, name)]
    if not wanted or has_paged_context(checkpoint.quantization):
        return features
    why = (
        f"TensorRT-LLM has no paged context FMHA for {algorithm or 'unquantised'} linear layers "
        f"with an {kv_cache} KV cache"
    )
    asked = [name for name in wanted if name in features.model_fields_set]
    if asked:
        raise ForgeError(
            f"engine.features.{asked[0]} cannot be had: {why}",
            hint="Use quantization.kv_cache: none, or format: fp8 with kv_cache: fp8, "
            f"or set engine.features.{asked[0]}: false.",
        )
    warnings.append(f"{' and '.join(wanted)} {'is' if len(wanted) == 1 else 'are'} off: {why}.")
    return features.model_copy(update={"kv_reuse": False, "chunked_context": False})


def _require(problems: Iterable[Problem], warnings: list[str]) -> None:
    for problem in problems:
        if problem.refuses:
            raise ForgeError(problem.message, hint=problem.fix)
        warnings.append(f"{problem.message}. {problem.fix}")
