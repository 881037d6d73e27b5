"""TensorRT-LLM's build configuration for one engine: our settings, and the release's defaults for all other keys.

The settings enable in-flight batching (paged KV cache, packed input). If TensorRT-LLM's `build()` would silently
switch off a feature, the plan warns, or raises an error if the recipe requests it explicitly.
"""

from copy import deepcopy
from dataclasses import asdict, dataclass

from pydantic import JsonValue

from trtforge.compile.built_features import built_features, feature_notes
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.recipe import EngineConfig
from trtforge.formats.attention_windows import attention_windows, executor_windows
from trtforge.formats.releases import Release, Section
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.engine_rules import engine_problems
from trtforge.plan.gpus import gpu_named
from trtforge.plan.legality import require_warnings_only
from trtforge.plan.limits import EngineLimits, derive_limits
from trtforge.plan.paged_context import FP8_ATTENTION, attention_problem, excludes, uses_paged_context

_FUSED_MLP = frozenset({None, "FP8"})
_GEMM_PLUGIN = {"FP8": None, "NVFP4": "nvfp4"}
"""Other formats: `auto`, the model's dtype. FP8: TensorRT's own kernels are faster (performance tuning guide)."""

WINDOWS_NOTE = (
    "TensorRT engines contain no sliding windows: trtforge writes them into the engine's config.json "
    "(pretrained_config.runtime_defaults.max_attention_window) and into "
    "config.pbtxt. An engine of trtllm-build lacks them."
)

_FEATURE_FIELDS = frozenset({"lora_plugin", "multiple_profiles"})
_NUM_TOKENS_ADVICE = 16384
_OMITTED = frozenset(
    {
        "auto_parallel_config",  # its keys are not known for every release, and its default has no effect
        "dry_run",  # these two apply to one run; trtllm-build drops them from an engine's config.json
        "visualize_network",
    }
)


@dataclass(frozen=True, kw_only=True)
class PluginPlan:
    """The fields of `plugin_config` that we set, with TensorRT-LLM's names. None is `disable`."""

    dtype: str
    gpt_attention_plugin: str | None = "auto"
    gemm_plugin: str | None
    context_fmha: bool = True
    remove_input_padding: bool = True
    paged_kv_cache: bool = True
    tokens_per_block: int
    use_paged_context_fmha: bool
    use_fp8_context_fmha: bool
    use_fused_mlp: bool
    lora_plugin: str | None = None
    multiple_profiles: bool = False


@dataclass(frozen=True)
class BuildPlan:
    """The build settings of one engine.

    `limits` and `features` are those of the engine; if they are below the recipe's defaults, `warnings` explains it.
    `notes` explain settings without a disadvantage. `logits_dtype` is the checkpoint's. `windows`: its sliding windows
    in the executor's form; empty without any.
    """

    release: Release
    limits: EngineLimits
    plugins: PluginPlan
    logits_dtype: str
    features: FeaturesConfig
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    kv_cache_type: str = "PAGED"
    strongly_typed: bool = True
    windows: tuple[int, ...] = ()

    @property
    def runtime_defaults(self) -> dict[str, JsonValue]:
        """Settings for the executor in the engine's config.json, besides those of the build; may be empty.

        Source: `runtime_defaults` in tensorrt_llm/models/modeling_utils.py (0.17 to 1.2), read by the executor's
        `KvCacheConfig::fillEmptyFieldsFromRuntimeDefaults`.
        """
        return {"max_attention_window": list(self.windows)} if self.windows else {}

    @property
    def build_settings(self) -> dict[str, JsonValue]:
        """The top-level fields that we set, by TensorRT-LLM's names; feature fields only if requested."""
        speculation, features = self.limits.speculation, self.features
        asked: dict[str, JsonValue] = {
            "weight_streaming": features.weights_on_gpu < 1,
            "gather_context_logits": features.context_logits,
            "gather_generation_logits": features.generation_logits,
            "max_prompt_embedding_table_size": features.max_prompt_embedding_table_size,
        }
        if speculation is not None:
            asked |= {"max_draft_len": speculation.draft_tokens, "speculative_decoding_mode": speculation.mode}
        return {
            **self.limits.build_fields,
            "kv_cache_type": self.kv_cache_type,
            "strongly_typed": self.strongly_typed,
            **{name: value for name, value in asked.items() if value},
        }

    @property
    def plugin_settings(self) -> dict[str, JsonValue]:
        """The fields of `plugin_config` that we set; feature fields only if requested."""
        return {name: value for name, value in asdict(self.plugins).items() if value or name not in _FEATURE_FIELDS}

    @property
    def lora_settings(self) -> dict[str, JsonValue]:
        """The fields of `lora_config` that we set; empty without LoRA."""
        lora = self.features.lora
        return {} if lora is None else {"lora_target_modules": list(lora.modules), "max_lora_rank": lora.max_rank}

    def to_json(self) -> dict[str, JsonValue]:
        """The whole BuildConfig: exactly the keys that this release has and whose value is known."""
        mode = self.limits.speculation.mode if self.limits.speculation else "NONE"
        objects: dict[str, JsonValue] = {
            "lora_config": _filled(self.release, "lora_config", self.lora_settings),
            "plugin_config": _filled(self.release, "plugin_config", self.plugin_settings),
            "speculative_decoding_mode": self.release.field("speculative_decoding_mode", mode).value,
        }
        return _filled(self.release, "build_config", self.build_settings | objects)


def build_config(
    checkpoint: CheckpointConfig, engine: EngineConfig, limits: EngineLimits, release: Release
) -> BuildPlan:
    """The build plan of `checkpoint` with `limits`, for `release`.

    Raises ForgeError for settings that the release refuses, and for an explicitly requested feature that it would
    switch off.
    """
    gpu = gpu_named(engine.target.gpu) if engine.target.gpu is not None else None
    warnings = require_warnings_only(engine_problems(checkpoint, release, gpu))
    features = built_features(checkpoint, engine, release, warnings)
    if features != engine.features:
        limits = derive_limits(checkpoint, engine.model_copy(update={"features": features}), limits.tokens_per_block)
    if limits.max_num_tokens > _NUM_TOKENS_ADVICE:
        warnings.append(
            f"max_num_tokens {limits.max_num_tokens} is above {_NUM_TOKENS_ADVICE}: trtllm-build warns that the "
            "activations of such an iteration take much memory for little speed-up."
        )
    algorithm = checkpoint.quantization.quant_algo
    notes = feature_notes(engine.features, features, limits)
    paged = uses_paged_context(features)
    problem = attention_problem(checkpoint, features)
    if problem is not None:
        raise ForgeError(problem.message, hint=problem.fix)
    gemm_plugin = _GEMM_PLUGIN.get(algorithm, "auto") if algorithm else "auto"
    windows = executor_windows(attention_windows(checkpoint), limits.max_seq_len + limits.spare_tokens)
    partly_unquantised = algorithm is not None and excludes(checkpoint, "mlp.fc", "mlp.gate")
    plugins = PluginPlan(
        dtype=checkpoint.dtype,
        gemm_plugin=gemm_plugin if features.weights_on_gpu == 1 else None,
        tokens_per_block=limits.tokens_per_block,
        use_paged_context_fmha=paged,
        use_fp8_context_fmha=_fp8_context_fmha(checkpoint, release, paged, notes),
        use_fused_mlp=algorithm in _FUSED_MLP and not partly_unquantised,
        lora_plugin="auto" if features.lora is not None else None,
        multiple_profiles=features.multiple_profiles,
    )
    if partly_unquantised:
        notes.append("use_fused_mlp is off: some layers lack the scaling factors of mlp.fc and mlp.gate.")
    elif not plugins.use_fused_mlp:
        notes.append(f"use_fused_mlp is off: TensorRT-LLM fuses only unquantised and FP8 MLPs, not {algorithm}.")
    return BuildPlan(
        release=release,
        limits=limits,
        plugins=plugins,
        logits_dtype=checkpoint.logits_dtype,
        features=features,
        warnings=(*limits.warnings, *warnings),
        notes=(*notes, *([WINDOWS_NOTE] if windows else [])),
        windows=windows,
    )


def in_flight_batching(plan: BuildPlan) -> bool:
    """Whether the engine supports in-flight batching.

    Source: `supportsInflightBatching` in cpp/include/tensorrt_llm/runtime/modelConfig.h, for transformer models.
    """
    return (
        plan.plugins.gpt_attention_plugin is not None
        and plan.plugins.remove_input_padding
        and plan.kv_cache_type in ("PAGED", "DISABLED")
    )


def _fp8_context_fmha(checkpoint: CheckpointConfig, release: Release, paged: bool, notes: list[str]) -> bool:
    """Whether context attention computes in FP8, as `build()` would set it.

    There is no rule for GPUs below SM 89: they do not run FP8 models at all.
    """
    quantization = checkpoint.quantization
    default = bool(release.field("plugin_config", "use_fp8_context_fmha").default)
    if quantization.quant_algo not in FP8_ATTENTION:
        if default:
            notes.append("use_fp8_context_fmha is off: it applies only to FP8 models.")
        return False
    if excludes(checkpoint, "attention.dense"):
        notes.append("use_fp8_context_fmha is off: some layers lack the input scale of attention.dense.")
        return False
    if not paged:
        return default
    if quantization.kv_cache_quant_algo == "FP8":
        notes.append(
            "use_fp8_context_fmha is on: it is required for an FP8 model with an FP8 KV cache and paged context."
        )
        return True
    notes.append(
        "use_fp8_context_fmha is off: with paged context it requires an FP8 KV cache (quantization.kv_cache: fp8)."
    )
    return False


def _filled(release: Release, section: Section, decided: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The keys of a section: our settings, else the release's default if known."""
    fields = release.fields(section)
    assert decided.keys() <= fields.keys(), f"{release.version}: {section} lacks {decided.keys() - fields.keys()}"
    return {
        name: decided[name] if name in decided else deepcopy(field.default)
        for name, field in fields.items()
        if name in decided or (field.default_known and name not in _OMITTED)
    }
