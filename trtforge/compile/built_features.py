"""The features of an engine: the requested ones, resolved and checked against each other and the release."""

from trtforge.core.features import FeaturesConfig
from trtforge.core.recipe import EngineConfig
from trtforge.formats.adapter import require_layers_of, resolved_features
from trtforge.formats.releases import Release
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.feature_rules import drafting_problems, feature_problems
from trtforge.plan.legality import require_warnings_only
from trtforge.plan.limits import EngineLimits
from trtforge.plan.paged_context import paged_context


def built_features(
    checkpoint: CheckpointConfig, engine: EngineConfig, release: Release, warnings: list[str]
) -> FeaturesConfig:
    """The features that are recorded in the engine, without paths. Minor problems are added to `warnings`.

    Raises ForgeError for an explicitly requested feature that is not available, and as `require_layers_of` does.
    """
    if engine.features.lora is not None:
        require_layers_of(engine.features.lora, "tensorrt_llm")
    paged = paged_context(checkpoint.quantization, engine.features)
    warnings += require_warnings_only(paged.problems)
    warnings += paged.warnings
    features = _without_directories(resolved_features(paged.features))
    wanted = engine.model_copy(update={"features": features})
    warnings += require_warnings_only(drafting_problems(checkpoint, wanted))
    warnings += require_warnings_only(feature_problems(checkpoint, wanted, release))
    return features


def _without_directories(features: FeaturesConfig) -> FeaturesConfig:
    """The features without the directories of heads and networks, which are in the checkpoint."""
    drafting = {"medusa": features.medusa, "eagle": features.eagle}
    found = {name: each.model_copy(update={"model": None}) for name, each in drafting.items() if each is not None}
    return features.model_copy(update=found)


def feature_notes(asked: FeaturesConfig, features: FeaturesConfig, limits: EngineLimits) -> list[str]:
    """Notes on what `build()` changes for a feature, and on consequences of it."""
    notes: list[str] = []
    if limits.speculation is not None:
        method, draft = limits.speculation.method, limits.speculation.draft_tokens
        layers = f" and {limits.speculation.depth} for EAGLE's layers" if limits.speculation.depth else ""
        notes.append(f"trtllm-build adds {draft} to max_seq_len for draft tokens{layers}; requests are not affected.")
        if limits.max_num_tokens == limits.max_batch_size * limits.verified_tokens:
            notes.append(
                f"max_num_tokens is {limits.max_num_tokens}: with {method} an iteration verifies "
                f"{limits.verified_tokens} tokens for each of {limits.max_batch_size} requests."
            )
    if features.eagle is not None and not (features.kv_reuse or features.chunked_context):
        notes.append("use_paged_context_fmha is on: EAGLE requires it.")
    if features.lora is not None:
        given = asked.lora.modules if asked.lora is not None else ()
        added = [module for module in features.lora.modules if given and module not in given]
        if added:
            notes.append(f"{' and '.join(added)}: added, because LoRA applies to query, key and value together.")
    if features.multiple_profiles:
        notes.append("opt_num_tokens is not set: with multiple_profiles each profile has its own.")
    if features.weights_on_gpu < 1:
        notes.append("gemm_plugin is off: plugins do not support weight streaming.")
    return notes
