"""The five models of a repository as data: names, tensors, parameters; from engine, tokenizer and settings."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.recipe import ServingConfig
from trtforge.engine_process.admission import DEFAULT_QUEUE_SIZE
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.llmapi import LlmArgs
from trtforge.formats.text_tensors import with_text_tensors
from trtforge.formats.triton import (
    ROLES,
    Direction,
    DtypeChoices,
    ModelRole,
    RepositoryFacts,
    Tensor,
    TextFlow,
    parameters,
    tensors,
    text_flow,
)
from trtforge.package.engine import EngineFacts
from trtforge.package.target import PackageTarget
from trtforge.package.tokenizer import TokenizerAssets
from trtforge.plan.runtime_keys import runtime_keys

ENGINE_DIRECTORY = "engine"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CANCELLATION_PERIOD_MS = 100
_TRITON_QUEUE = 16384  # requests that Triton has not passed to a Python model yet, which takes them immediately
ModelCode = Literal["1", "llmapi", "triton"]
"""Directory of a role's model.py: the default, for the LLM API, or for an engine model that Triton itself runs."""
TEXT_ROLES: tuple[ModelRole, ...] = ("ensemble", "tensorrt_llm_bls")
"""The models that take text, or messages, and return text."""
_DTYPES = {"float16": "TYPE_FP16", "bfloat16": "TYPE_BF16", "float32": "TYPE_FP32"}


class PackageConfig(Config):
    """How an engine is packaged.

    All paths in the repository are relative to it, except that the TensorRT-LLM backend needs an absolute engine path.
    `serving_root` is where the repository will be mounted (launchers that serve it from elsewhere insert their path).
    """

    serving: ServingConfig = ServingConfig()
    name_prefix: str = Field("", max_length=100, description="Prefix of the five model names.")
    serving_root: str = Field("/models", pattern="^/", description="Path of the repository for a TensorRT-LLM server.")
    add_special_tokens: bool = Field(True, description="Add the tokenizer's special tokens to the prompt.")
    kv_reuse: bool | None = Field(None, description="Share KV blocks between requests; None: as built.")
    chunked_context: bool | None = Field(None, description="Split long prompts into chunks; None: as built.")
    features: FeaturesConfig | None = Field(None, description="What the engine was built for; None: as recorded.")
    target: PackageTarget = PackageTarget()

    @field_validator("name_prefix")
    @classmethod
    def _is_part_of_a_name(cls, value: str) -> str:
        """Model names are directory names: a prefix must not leave the repository or hide them."""
        if value and not _PREFIX.fullmatch(value):
            raise ValueError("a prefix begins with a letter or digit and holds letters, digits, '.', '_' and '-' only")
        return value


@dataclass(frozen=True)
class ModelSpec:
    """The values of one config.pbtxt. `code`: the directory of the role's templates that holds its model.py."""

    role: ModelRole
    name: str
    backend: str
    max_batch_size: int
    decoupled: bool
    max_queue_size: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, str]
    code: ModelCode = "1"


def repository_facts(config: PackageConfig, engine: EngineFacts) -> RepositoryFacts:
    """The facts that launchers and clients read from the repository's manifest."""
    name = f"{config.name_prefix}tensorrt_llm/1/{ENGINE_DIRECTORY}"
    return RepositoryFacts(
        backend=engine.backend,
        device=engine.device,
        tensorrt_llm=engine.served_by,
        world_size=engine.world_size,
        prefix=config.name_prefix,
        streaming=config.serving.streaming,
        max_batch_size=engine.max_batch_size,
        target=engine.target,
        engine_path=ENGINE_DIRECTORY if engine.backend == "torch" else f"{config.serving_root.rstrip('/')}/{name}",
    )


def model_specs(config: PackageConfig, engine: EngineFacts, tokenizer: TokenizerAssets) -> tuple[ModelSpec, ...]:
    """The five models. Raises ForgeError for a setting that this engine cannot serve."""
    facts = repository_facts(config, engine)
    dtypes = DtypeChoices(
        logits=_DTYPES.get(engine.logits_dtype, "TYPE_FP32"), prompt_table=_DTYPES.get(engine.dtype, "TYPE_FP16")
    )
    flow = text_flow(engine.release)
    preprocessing = _preprocessing_parameters(config, engine, tokenizer)
    values: Mapping[ModelRole, Mapping[str, str]] = {
        "ensemble": _text_parameters(config, facts, flow, preprocessing, tokenizer, by_text=False),
        "preprocessing": preprocessing,
        "tensorrt_llm": _engine_parameters(config, engine, facts, tokenizer),
        "postprocessing": {"tokenizer_dir": TOKENIZER_DIRECTORY, "vocab_size": str(engine.vocab_size)},
        "tensorrt_llm_bls": _text_parameters(config, facts, flow, preprocessing, tokenizer, by_text=True),
    }
    return tuple(
        ModelSpec(
            role=role,
            name=facts.model(role),
            backend="tensorrtllm" if role == "tensorrt_llm" and engine.backend == "tensorrt_llm" else "python",
            max_batch_size=engine.max_batch_size,
            decoupled=config.serving.streaming,
            max_queue_size=(
                _queue_size(config.serving)
                if role == "tensorrt_llm" and engine.backend == "tensorrt_llm"
                else _TRITON_QUEUE
            ),
            inputs=_tensors(role, "inputs", engine, dtypes, tokenizer),
            outputs=_tensors(role, "outputs", engine, dtypes, tokenizer),
            parameters=values[role],
            code=_code(role, engine.backend),
        )
        for role in ROLES
    )


def _tensors(
    role: ModelRole, direction: Direction, engine: EngineFacts, dtypes: DtypeChoices, tokenizer: TokenizerAssets
) -> tuple[Tensor, ...]:
    declared = tensors(role, direction, engine.release, dtypes)
    return with_text_tensors(declared, direction, chat=tokenizer.chat is not None) if role in TEXT_ROLES else declared


def _code(role: ModelRole, backend: str) -> ModelCode:
    if role == "tensorrt_llm" and backend == "llmapi":
        return "llmapi"
    return "triton" if role in ("ensemble", "tensorrt_llm_bls") and backend == "tensorrt_llm" else "1"


def _text_parameters(
    config: PackageConfig,
    facts: RepositoryFacts,
    flow: TextFlow,
    preprocessing: Mapping[str, str],
    tokenizer: TokenizerAssets,
    *,
    by_text: bool,
) -> Mapping[str, str]:
    """A text model tokenizes itself, so it has the parameters of preprocessing too."""
    return {
        **preprocessing,
        "tokenizer_dir": TOKENIZER_DIRECTORY,
        "tensorrt_llm_model_name": facts.model("tensorrt_llm"),
        "exclude_input_in_output": _boolean(config.serving.exclude_input_in_output),
        "stop_words_as_text": _boolean(by_text),
        "engine_end_ids": _boolean(facts.backend != "tensorrt_llm"),
        "engine_scores": _boolean(facts.backend == "torch"),
        "chat_template": _boolean(tokenizer.chat is not None),
        "cancellation_check_period_ms": str(_CANCELLATION_PERIOD_MS),
        "text_to_preprocessing": _pairs(flow.text_to_preprocessing),
        "preprocessing_to_engine": _pairs(flow.preprocessing_to_engine),
        "text_to_engine": _pairs(flow.text_to_engine),
        "engine_to_text": _pairs(flow.engine_to_text),
    }


def _preprocessing_parameters(
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


def _engine_parameters(
    config: PackageConfig, engine: EngineFacts, facts: RepositoryFacts, tokenizer: TokenizerAssets
) -> Mapping[str, str]:
    """TensorRT-LLM's parameters; the other engines read the same ones and four more.

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
    if engine.backend != "tensorrt_llm":
        return values | {
            "end_ids": ",".join(map(str, tokenizer.end_ids)),
            "vocab_size": str(engine.vocab_size),
            "max_queue_size": str(_queue_size(serving)),
            "max_queue_seconds": "" if serving.max_queue_seconds is None else str(serving.max_queue_seconds),
        }
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
    if "scheduler" in given or engine.llm_args.scheduler_config.capacity_scheduler_policy is None:
        values["scheduler_config.capacity_scheduler_policy"] = serving.scheduler.upper()
    return engine.llm_args.with_values(values, "serving")


def _feature(name: str, wanted: bool | None, built: bool, engine: EngineFacts) -> bool:
    """Whether kv_reuse or chunked_context is on; both need paged context attention (use_paged_context_fmha)."""
    if wanted and not engine.paged_context:
        raise ForgeError(
            f"{name}: the engine was built without use_paged_context_fmha",
            hint="Compile it with that feature, or package it without.",
        )
    return built if wanted is None else wanted


def _queue_size(serving: ServingConfig) -> int:
    return serving.max_queue_size or DEFAULT_QUEUE_SIZE


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return ",".join(f"{source}:{target}" for source, target in pairs)
