"""The parameters of the models' config.pbtxt and an LLM API model's arguments, from settings, engine and tokenizer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.features import DraftFeature
from trtforge.core.serving import ServingConfig
from trtforge.engine_process.admission import DEFAULT_QUEUE_SIZE
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.known_issues import known_issues
from trtforge.formats.llmapi import LlmArgs
from trtforge.formats.triton import RepositoryFacts, TextFlow, parameters
from trtforge.package.config import PackageConfig
from trtforge.package.engine_facts import EngineFacts
from trtforge.package.tokenizer import TokenizerAssets
from trtforge.plan.host_blocks import too_small
from trtforge.plan.legality import require_warnings_only
from trtforge.plan.runtime_keys import runtime_keys
from trtforge.plan.serving_rules import LLM_ARGUMENTS, ServedEngine, limit_problems, serving_problems

ENGINE_DIRECTORY = "engine"
"""The engine's directory in a repository, below the version of its engine model."""
TOKENIZER_INFO_FILE = "xgrammar_tokenizer_info.json"
"""The tokenizer data for guided decoding, beside the engine."""
DRAFTING_INPUTS = tuple((name, name) for name in ("num_draft_tokens", "use_draft_logits"))
"""Inputs of `tensorrt_llm_bls` that control drafting."""
_CANCELLATION_PERIOD_MS = 100


def text_parameters(
    config: PackageConfig,
    facts: RepositoryFacts,
    flow: TextFlow,
    preprocessing: Mapping[str, str],
    tokenizer: TokenizerAssets,
    bfloat16_inputs: Sequence[str],
    *,
    by_text: bool,
) -> dict[str, str]:
    """The parameters of a text model; as it tokenizes itself, they include those of preprocessing.

    `bfloat16_inputs`: inputs of the engine model that are bfloat16.
    """
    return {
        **preprocessing,
        "tokenizer_dir": TOKENIZER_DIRECTORY,
        "tensorrt_llm_model_name": facts.model("tensorrt_llm"),
        "exclude_input_in_output": _boolean(config.serving.exclude_input_in_output),
        "stop_words_as_text": _boolean(by_text),
        "engine_end_ids": _boolean(facts.backend != "tensorrt_llm"),
        "engine_scores": _boolean(facts.backend != "tensorrt_llm"),
        "guided_decoding": _boolean(facts.backend == "torch" or config.serving.guided_decoding_backend is not None),
        "bfloat16_inputs": ",".join(bfloat16_inputs),
        "chat_template": _boolean(tokenizer.chat is not None),
        "strict_calls": _boolean(facts.backend == "torch"),
        "cancellation_check_period_ms": str(_CANCELLATION_PERIOD_MS),
        "text_to_preprocessing": _pairs(flow.text_to_preprocessing),
        "preprocessing_to_engine": _pairs(flow.preprocessing_to_engine),
        "text_to_engine": _pairs(flow.text_to_engine),
        "engine_to_text": _pairs(flow.engine_to_text),
    }


def request_parameters(config: PackageConfig, engine: EngineFacts) -> dict[str, str]:
    """Limits by which our Python models check requests; a TensorRT engine's executor checks requests itself."""
    values: dict[str, str] = {}
    if engine.backend == "llmapi":
        values |= {
            "guided_decoding": _boolean(config.serving.guided_decoding_backend is not None),
            "random_seed": _boolean(True),  # for requests without a seed
            "takes_drafts": _boolean(False),
            "takes_phases": _boolean(False),
        }
    if engine.backend == "torch":
        if engine.max_beam_width > 1:
            values["max_beam_width"] = str(engine.max_beam_width)
        returned = [name for name in ("context_logits", "generation_logits") if getattr(engine.features, name)]
        if engine.features.lora is not None:
            values["takes_adapters"] = _boolean(True)
        if engine.features.max_prompt_embedding_table_size:
            values["takes_prompt_tables"] = _boolean(True)
        if returned:
            values["returned_logits"] = ",".join(f"return_{name}" for name in returned)
    if engine.adapters:
        values["lora_task_ids"] = ",".join(map(str, engine.adapters))
    return values


def drafting_parameters(engine: EngineFacts, facts: RepositoryFacts) -> dict[str, str]:
    """The additional parameters of text models for a draft engine; empty without one."""
    if facts.draft_model is None:
        return {}
    most = (engine.features.draft or DraftFeature()).tokens
    most = most if engine.backend == "torch" else min(most, engine.max_draft_len)
    return {"tensorrt_llm_draft_model_name": facts.draft_model, "num_draft_tokens": str(most)}


def preprocessing_parameters(
    config: PackageConfig, engine: EngineFacts, tokenizer: TokenizerAssets
) -> Mapping[str, str]:
    return {
        "tokenizer_dir": TOKENIZER_DIRECTORY,
        "add_special_tokens": _boolean(config.add_special_tokens),
        "multimodal_model_path": "",
        "end_ids": ",".join(map(str, tokenizer.end_ids)),
        "pad_id": str(tokenizer.pad_id),
        "end_ids_as_stop_words": _boolean(engine.backend == "tensorrt_llm"),
        "vocab_size": str(engine.vocab_size),
        "max_input_len": str(engine.max_input_len),
    }


def engine_parameters(
    config: PackageConfig, engine: EngineFacts, facts: RepositoryFacts, tokenizer: TokenizerAssets
) -> dict[str, str]:
    """TensorRT-LLM's parameters; the other engines read these and four more.

    Its C++ backend accepts booleans only as `true` and `false` and silently ignores any other spelling.
    """
    serving = config.serving
    reuse = _feature("kv_reuse", config.kv_reuse, engine.features.kv_reuse, engine)
    chunked = _feature("chunked_context", config.chunked_context, engine.features.chunked_context, engine)
    if engine.features.draft is not None and not reuse:
        raise ForgeError(
            "kv_reuse is off: an engine that verifies a draft model's tokens needs it",
            hint="Package it with KV reuse, or compile it without engine.features.draft.",
        )
    values = {
        "max_beam_width": str(engine.max_beam_width),
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": facts.engine_path,
        "batch_scheduler_policy": serving.scheduler,
        "kv_cache_free_gpu_mem_fraction": str(serving.kv_cache_fraction),
        "enable_kv_cache_reuse": _boolean(reuse),
        "enable_chunked_context": _boolean(chunked),
        "exclude_input_in_output": _boolean(serving.exclude_input_in_output),
        "cancellation_check_period_ms": str(_CANCELLATION_PERIOD_MS),
        "stats_check_period_ms": "100",
        **{key.key: key.value for key in runtime_keys(engine.features)},
    }
    if serving.kv_cache_tokens is not None:
        values["max_tokens_in_paged_kv_cache"] = str(serving.kv_cache_tokens)
    if engine.backend == "torch":
        values |= {key: _spelled(value) for key, value in serving.executor_settings.items()}
        values |= {key: str(value) for key, value in serving.lowered_limits.items()}
    if engine.backend != "tensorrt_llm":
        return values | {
            "end_ids": ",".join(map(str, tokenizer.end_ids)),
            "vocab_size": str(engine.vocab_size),
            "max_queue_size": str(queue_size(serving)),
            "max_queue_seconds": "" if serving.max_queue_seconds is None else str(serving.max_queue_seconds),
        }
    values |= dict(_executor_parameters(serving, engine, facts))
    known = parameters("tensorrt_llm", engine.release)
    missing = set(values) - {parameter.key for parameter in known}
    if missing:
        raise ForgeError(
            f"TensorRT-LLM {engine.release.version} has no parameter {sorted(missing)[0]}",
            hint="Use the default of that setting.",
        )
    return {
        parameter.key: parameter.literal if parameter.literal is not None else values.get(parameter.key, "")
        for parameter in known
        if parameter.key in values or parameter.required
    }


def _executor_parameters(
    serving: ServingConfig, engine: EngineFacts, facts: RepositoryFacts
) -> Iterator[tuple[str, str]]:
    """The settings that only TensorRT-LLM's executor has; a window in the recipe replaces the model's."""
    if engine.windows:
        yield "max_attention_window_size", _spelled(engine.windows)
    yield from ((key, _spelled(value)) for key, value in serving.executor_settings.items())
    if serving.guided_decoding_backend is not None:
        yield "xgrammar_tokenizer_info_path", str(Path(facts.engine_path).parent / TOKENIZER_INFO_FILE)


def require_servable(config: PackageConfig, engine: EngineFacts) -> Iterator[str]:
    """Warnings about the serving settings. Raises ForgeError for a setting that the engine or its release lacks."""
    reuse = _feature("kv_reuse", config.kv_reuse, engine.features.kv_reuse, engine)
    features = engine.features.model_copy(update={"kv_reuse": reuse})
    served = ServedEngine(
        engine.backend, engine.release, features, engine.world_size, engine.layers, engine.has_windows
    )
    offloaded = config.serving.kv_cache_host_memory_bytes
    small = too_small(offloaded, engine.kv_block) if offloaded is not None else ()
    if engine.backend == "torch":
        small = *small, *limit_problems(config.serving, engine.max_batch_size, engine.tokens_per_block)
    yield from require_warnings_only((*serving_problems(config.serving, served), *small))
    if engine.backend == "tensorrt_llm" and reuse and len(set(engine.windows)) > 1:
        for issue in known_issues("windows_with_kv_reuse", engine.release):
            off = "Compile it with --feature kv_reuse=false if that happens."
            yield f"TensorRT-LLM {engine.release.version}: {issue.says} ({issue.source}). {off}"


def serving_args(config: PackageConfig, engine: EngineFacts) -> LlmArgs | None:
    """The model.yaml of the packaged model: the engine's, with the serving settings; None for other backends.

    A setting that is not given keeps the engine's value, which may come from a migration.
    """
    if engine.llm_args is None:
        return None
    serving, cache, features = config.serving, engine.llm_args.kv_cache_config, engine.features
    given = serving.model_fields_set
    values: dict[str, Any] = {
        "model": ENGINE_DIRECTORY,
        "kv_cache_config.enable_block_reuse": _feature("kv_reuse", config.kv_reuse, features.kv_reuse, engine),
        "enable_chunked_prefill": _feature("chunked_context", config.chunked_context, features.chunked_context, engine),
        "triton_config": None,
    }
    if "kv_cache_fraction" in given or cache.free_gpu_memory_fraction is None:
        values["kv_cache_config.free_gpu_memory_fraction"] = serving.kv_cache_fraction
    if serving.kv_cache_tokens is not None:
        values["kv_cache_config.max_tokens"] = serving.kv_cache_tokens
    for key, limit in serving.lowered_limits.items():
        values[key] = min(limit, getattr(engine.llm_args, key) or limit)
    values |= {LLM_ARGUMENTS[key]: value for key, value in serving.executor_settings.items()}
    if "scheduler" in given or engine.llm_args.scheduler_config.capacity_scheduler_policy is None:
        values["scheduler_config.capacity_scheduler_policy"] = serving.scheduler.upper()
    for key in ("speculative_model", "speculative_model_dir"):
        draft = getattr(engine.llm_args.speculative_config, key)
        if draft is not None:
            values[f"speculative_config.{key}"] = f"{ENGINE_DIRECTORY}/{draft}"
    return engine.llm_args.with_values(values, "serving")


def _feature(name: str, wanted: bool | None, built: bool, engine: EngineFacts) -> bool:
    """Whether kv_reuse or chunked_context is on; both need paged context attention (use_paged_context_fmha)."""
    if wanted and not engine.paged_context:
        raise ForgeError(
            f"{name}: the engine was built without use_paged_context_fmha",
            hint="Compile it with that feature, or package it without.",
        )
    return built if wanted is None else wanted


def queue_size(serving: ServingConfig) -> int:
    """The largest number of requests that wait for the engine."""
    return serving.max_queue_size or DEFAULT_QUEUE_SIZE


def _spelled(value: Any) -> str:
    """A value of config.pbtxt: the C++ backend reads lists with commas, and booleans only as true and false."""
    if isinstance(value, bool):
        return _boolean(value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return ",".join(f"{source}:{target}" for source, target in pairs)
