"""The llmapi backend: a Hugging Face checkpoint and model.yaml, which TensorRT-LLM's LLM API runs without an engine.

The source is a TensorRT-LLM checkpoint, whose rank files are merged, or a Hugging Face checkpoint as it is: for models
that trtforge does not convert, and for checkpoints that are already quantised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from trtforge.compile.llmapi_windows import Windows
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import EngineConfig
from trtforge.formats.adapter import require_layers_of, resolved_lora
from trtforge.formats.adapter_pairs import require_scaled_pairs
from trtforge.formats.checkpoint_keys import integer
from trtforge.formats.compressed_tensors import COMPRESSED_TENSORS
from trtforge.formats.hf import HfConfig, read_config
from trtforge.formats.llmapi import (
    MODEL_FILE,
    KvCacheArgs,
    LlmArgs,
    has_argument,
    reads_quant_method,
    require_llm_api,
    require_mixed_precision,
    require_served,
)
from trtforge.formats.quantization_config import MODELOPT_FILE, quantization_method, read_quantized_source
from trtforge.formats.quantization_values import ORIGINAL
from trtforge.formats.quantized_source import Packing, QuantizedSource
from trtforge.formats.trtllm import CheckpointConfig, Quantization
from trtforge.models.formats import FORMATS
from trtforge.models.hf_export_plan import require_format
from trtforge.plan.gpus import Gpu, gpu_named, require_formats
from trtforge.plan.legality import require_warnings_only
from trtforge.plan.limits import EngineLimits, Positions, derive_limits
from trtforge.plan.llm_api_arguments import (
    LlmApiModel,
    draft_source,
    feature_arguments,
    llm_api_problems,
    sampler_arguments,
)
from trtforge.plan.published import require_published
from trtforge.plan.speculation import stored

TOKENS_PER_BLOCK = 32
"""KvCacheConfig's default (tensorrt_llm/llmapi/llm_args.py, 1.2)."""
_SCALES_ARE_ONE = (
    "TensorRT-LLM's PyTorch backend runs an FP8 KV cache with scaling factor 1; the checkpoint's are not used."
)
"""`forward_impl` in _torch/modules/attention.py passes the scales of an NVFP4 cache only (1.3.0rc3)."""


_COMPRESSED_SCHEMES: frozenset[Packing] = frozenset({"fp8_rows", "nvfp4"})
"""The schemes of compressed-tensors that trtforge reads and TensorRT-LLM does too."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

Origin = Literal["checkpoint", "hugging_face"]
"""The source of an LLM API model."""


@dataclass(frozen=True)
class LlmapiPlan:
    """The output, planned from metadata alone. `made_from`: the source of the weights.

    `draft`: hub id or directory of the draft model, `adapters`: PEFT directories; both become part of the engine.
    """

    args: LlmArgs
    target: str
    limits: EngineLimits
    made_from: Origin
    warnings: tuple[str, ...] = ()
    draft: str | None = None
    adapters: tuple[str, ...] = ()

    def with_args(self, values: Mapping[str, Any]) -> "LlmapiPlan":
        """A copy with other arguments, by dotted key."""
        return replace(self, args=self.args.with_values(values, MODEL_FILE))

    def identity(self) -> dict[str, Any]:
        """What determines the engine's bytes besides its inputs; `longest_prompt` is for the package stage."""
        return {
            "backend": "llmapi",
            "made_from": self.made_from,
            "model_yaml": self.args.to_json(),
            "longest_prompt": self.limits.longest_prompt,
        }

    def as_json(self) -> dict[str, Any]:
        """The output of --dry-run."""
        return {
            "backend": "llmapi",
            "tensorrt_llm": self.target,
            "model_yaml": self.args.to_json(),
            "made_from": self.made_from,
            "in_flight_batching": True,
            "longest_prompt": self.limits.longest_prompt,
            "processes": self.args.world_size,
            **({"draft": self.draft} if self.draft else {}),
            **({"adapters": list(self.adapters)} if self.adapters else {}),
            "warnings": [*self.limits.warnings, *self.warnings],
        }


@dataclass(frozen=True)
class _HfPositions:
    """The position limits of a model whose family trtforge does not have."""

    max_position_embeddings: int | None
    rotary_scaling: dict[str, Any] | None
    position_embedding_type: str = "unknown"

    @classmethod
    def of(cls, config: HfConfig) -> "_HfPositions":
        text = _text_config(config)
        positions = text.values.get("max_position_embeddings")
        return cls(positions if isinstance(positions, int) else None, text.rope_scaling)


def plan_for_checkpoint(model: CheckpointConfig, config: EngineConfig) -> LlmapiPlan:
    """The plan for a TensorRT-LLM checkpoint of this configuration. Raises ForgeError for an unsupported format."""
    require_format(model)
    mixed = model.quantization.quantized_layers or {}
    require_mixed_precision(config.target.tensorrt_llm, {layer.quant_algo for layer in mixed.values()})
    cache = model.quantization.kv_cache_quant_algo == "FP8"
    warnings = (_SCALES_ARE_ONE,) if cache else ()
    layers = stored(model, "num_nextn_predict_layers") or 0
    chunk = integer(model, "attention_chunk_size")
    facts = LlmApiModel(model.parallel.tp, model.experts > 0, layers, model.architecture, chunk, model.parallel.pp)
    windows = Windows.of_checkpoint(model)
    plan = _plan(model, model.parallel, config, "checkpoint", windows, facts, fp8_cache=cache)
    return replace(plan, warnings=(*warnings, *plan.warnings))


def plan_for_hugging_face(
    directory: Path, parallel: Parallel, config: EngineConfig, *, fp8_cache: bool = False
) -> LlmapiPlan:
    """The plan for a Hugging Face checkpoint as it is.

    Raises ForgeError if it is not a checkpoint, if `parallel` cannot split its heads or layers, or if the target GPU
    does not support its format.
    """
    return plan_for_hf_config(read_config(directory), parallel, config, fp8_cache=fp8_cache)


def plan_for_hf_config(
    found: HfConfig, parallel: Parallel, config: EngineConfig, *, fp8_cache: bool = False
) -> LlmapiPlan:
    """Like `plan_for_hugging_face`, from the config.json of a checkpoint that need not be on this machine."""
    _require_split(found, parallel)
    gpu = None if config.target.gpu is None else gpu_named(config.target.gpu)
    warnings = _require_stored_formats(found, config.target.tensorrt_llm, gpu)
    text = _text_config(found)
    windows, facts = Windows.of_hugging_face(found, text), _facts(found, text, parallel)
    plan = _plan(_HfPositions.of(found), parallel, config, "hugging_face", windows, facts, fp8_cache=fp8_cache)
    return replace(plan, warnings=(*warnings, *plan.warnings))


def _text_config(config: HfConfig) -> HfConfig:
    """The language model's part of a multimodal config, or the config itself."""
    values = config.values.get("text_config")
    return HfConfig(values, config.path) if values and isinstance(values, dict) else config


def _facts(config: HfConfig, text: HfConfig, parallel: Parallel) -> LlmApiModel:
    """Experts and MTP layers, by the names that config.json has in the models of `transformers`."""
    experts = any(text.values.get(name) for name in _EXPERTS)
    layers = text.values.get("num_nextn_predict_layers", 0)
    chunk = text.values.get("attention_chunk_size")
    return LlmApiModel(
        parallel.tp,
        experts,
        layers if isinstance(layers, int) else None,
        config.architecture,
        chunk if isinstance(chunk, int) else 0,
        parallel.pp,
    )


def _require_split(config: HfConfig, parallel: Parallel) -> None:
    """Raises ForgeError if the ranks cannot split the heads or layers.

    Key and value heads are repeated if there are fewer than ranks (`duplicate_kv_weight`,
    _torch/models/modeling_utils.py); pipeline stages may differ by one layer (`pp_layers`, mapping.py).
    """
    values = _text_config(config).values
    heads, kv_heads, layers = (
        value if isinstance(value := values.get(f"num_{name}"), int) and value > 0 else None
        for name in ("attention_heads", "key_value_heads", "hidden_layers")
    )
    tp = parallel.tp
    if heads is not None and heads % tp:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ForgeError(
            f"{heads} attention heads cannot be split over tp {tp}",
            hint=f"Choose a --tp that divides {heads}: {legal}.",
        )
    if kv_heads is not None and kv_heads % tp and tp % kv_heads:
        raise ForgeError(
            f"{kv_heads} key and value heads can be neither split over tp {tp} nor repeated",
            hint=f"Choose a --tp that divides {kv_heads}, or a multiple of it.",
        )
    if layers is not None and layers < parallel.pp:
        raise ForgeError(f"{layers} layers are fewer than pp {parallel.pp}", hint=f"Choose a --pp up to {layers}.")


def _require_stored_formats(config: HfConfig, target: str, gpu: Gpu | None) -> tuple[str, ...]:
    """Check the checkpoint's quantisation against the target release and the GPU.

    A format that the release reads and trtforge does not is only a warning.
    """
    if config.fp8_blocks is not None or quantization_method(config) == "mxfp4":
        require_published(config, gpu)
        return ()
    try:
        stored, unread = read_quantized_source(config), None
    except ForgeError as error:
        stored, unread = None, error
    warnings = _require_read(config, stored, target)
    if unread is not None and gpu is not None:
        warnings += (f"not checked that {gpu.name} supports the checkpoint's quantisation: {unread.message}",)
    if stored is not None:
        cache = "FP8" if stored.fp8_kv_cache else None
        for algorithm in (FORMATS[name].algorithm for name in stored.formats):
            require_served(algorithm)
            if gpu is not None:
                require_formats(gpu, Quantization(quant_algo=algorithm, kv_cache_quant_algo=cache))
    return warnings


def _require_read(config: HfConfig, stored: QuantizedSource | None, target: str) -> tuple[str, ...]:
    """Check that the target release reads the description of a checkpoint's quantisation; returns warnings.

    `stored`: the quantisation, None for an unquantised checkpoint and for one that trtforge does not read.
    """
    directory, method = config.path.parent, quantization_method(config)
    if method == "none" or (directory / MODELOPT_FILE).is_file():
        return ()
    described = f"{directory} is quantised ({method})"
    read, schemes = reads_quant_method(target, method.partition("_")[0]), {each.packing for each in _parts(stored)}
    if method == COMPRESSED_TENSORS and (stored is None or not schemes <= _COMPRESSED_SCHEMES):
        read = False
        described += f", {'in another scheme' if stored is None else stored.described}"
    if not read:
        convert = f"Convert it and compile the checkpoint: `trtforge convert {quote(str(directory))} CHECKPOINT`."
        raise ForgeError(
            f"{described}, which TensorRT-LLM {target} is not known to read: its PyTorch backend reads ModelOpt's "
            f"{MODELOPT_FILE}, FP8 with block scales and MXFP4, and from 1.3 on FP8, NVFP4 and two schemes of "
            "compressed-tensors",
            hint=convert if stored is not None else ORIGINAL,
        )
    if method == COMPRESSED_TENSORS and schemes != {"fp8_rows"}:
        return (f"{described}: only late release candidates of TensorRT-LLM 1.3 read this scheme",)
    return ()


def _parts(stored: QuantizedSource | None) -> tuple[QuantizedSource, ...]:
    return () if stored is None else (stored, *stored.others)


def _plan(
    model: Positions,
    parallel: Parallel,
    config: EngineConfig,
    made_from: Origin,
    windows: Windows,
    facts: LlmApiModel,
    *,
    fp8_cache: bool,
) -> LlmapiPlan:
    target = config.target.tensorrt_llm
    require_llm_api(target, LlmArgs())
    features = _with_lora(config.features)
    notes = tuple(require_warnings_only(llm_api_problems(config.model_copy(update={"features": features}), facts)))
    limits = derive_limits(model, config, TOKENS_PER_BLOCK)
    if limits.max_beam_width > 1:
        raise ForgeError(
            f"max_beam_width {limits.max_beam_width}: the llmapi backend has no beam search",
            hint="Use max_beam_width 1, or the tensorrt_llm backend.",
        )
    applied, warnings = windows.applied(target, limits.max_seq_len)
    args = LlmArgs(
        tensor_parallel_size=parallel.tp,
        pipeline_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp if parallel.cp > 1 else None,
        moe_tensor_parallel_size=parallel.tp // parallel.ep if parallel.ep > 1 else None,
        moe_expert_parallel_size=parallel.ep if parallel.ep > 1 else None,
        max_batch_size=limits.max_batch_size,
        max_input_len=limits.max_input_len,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        max_beam_width=limits.max_beam_width,
        enable_chunked_prefill=config.features.chunked_context,
        kv_cache_config=KvCacheArgs(
            enable_block_reuse=config.features.kv_reuse and facts.shares_blocks,
            max_attention_window=applied,
            tokens_per_block=_tokens_per_block(config, limits),
            dtype="fp8" if fp8_cache else "auto",
        ),
    )
    set_by_features = {**feature_arguments(features, target), **sampler_arguments(features, target)}
    args = args.with_values(set_by_features, "engine.features")
    require_llm_api(target, args)
    adapters = config.features.lora.adapters if config.features.lora is not None else ()
    return LlmapiPlan(args, target, limits, made_from, (*warnings, *notes), draft_source(features), adapters)


def _with_lora(features: FeaturesConfig) -> FeaturesConfig:
    """The features with LoRA's rank and modules resolved. Raises ForgeError as `resolved_lora` does, and for adapters
    of which the LLM API would skip a part."""
    if features.lora is None:
        return features
    resolved = features.model_copy(update={"lora": resolved_lora(features.lora)})
    require_layers_of(features.lora, "llmapi")
    for directory in map(Path, features.lora.adapters):
        require_scaled_pairs(directory)
    return resolved


def _tokens_per_block(config: EngineConfig, limits: EngineLimits) -> int | None:
    """None if the release lacks the argument and the recipe does not set it: blocks have TOKENS_PER_BLOCK tokens."""
    key = "kv_cache_config.tokens_per_block"
    had = has_argument(config.target.tensorrt_llm, key)
    return limits.tokens_per_block if had or config.tokens_per_block is not None else None
