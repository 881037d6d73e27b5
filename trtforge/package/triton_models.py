"""The five Triton models of a repository as data: their names, tensors and parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.text_tensors import with_text_tensors
from trtforge.formats.triton import (
    DRAFT_MODEL,
    ROLES,
    Direction,
    DtypeChoices,
    ModelRole,
    RepositoryFacts,
    Tensor,
    tensors,
    text_flow,
)
from trtforge.package.config import PackageConfig
from trtforge.package.draft import DraftEngine
from trtforge.package.engine_facts import EngineFacts
from trtforge.package.parameters import (
    DRAFTING_INPUTS,
    ENGINE_DIRECTORY,
    drafting_parameters,
    engine_parameters,
    preprocessing_parameters,
    queue_size,
    request_parameters,
    text_parameters,
)
from trtforge.package.tokenizer import TokenizerAssets

ModelCode = Literal["1", "llmapi", "triton"]
"""Directory of a role's model.py: the default, the LLM API's, or that for an engine model that Triton itself runs."""
TEXT_ROLES: tuple[ModelRole, ...] = ("ensemble", "tensorrt_llm_bls")
"""The models that take text, or messages, and return text."""
_BFLOAT16 = "TYPE_BF16"
_DTYPES = {"float16": "TYPE_FP16", "bfloat16": "TYPE_BF16", "float32": "TYPE_FP32"}


@dataclass(frozen=True)
class ModelSpec:
    """The values of one config.pbtxt. `code`: the directory with model.py in the role's templates.

    `draft`: whether it is the draft engine's engine model. `max_queue_size`: of Triton's dynamic batcher, which only
    TensorRT-LLM's own backend uses. Python models get each request at once, and their engine batches. The dynamic
    batcher would combine only requests with the same optional inputs and delay the others by half a second at a time
    (`default_wait_microseconds`, triton-inference-server/core, src/dynamic_batch_scheduler.cc).
    """

    role: ModelRole
    name: str
    backend: str
    max_batch_size: int
    decoupled: bool
    max_queue_size: int | None
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, str]
    code: ModelCode = "1"
    instances: int = 1
    draft: bool = False


def repository_facts(config: PackageConfig, engine: EngineFacts, draft: EngineFacts | None = None) -> RepositoryFacts:
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
        gpus=config.serving.instances,
        participants=config.serving.participants,
        adapters=dict(engine.adapter_names),
        draft_ranks=0 if draft is None else draft.world_size,
        draft_gpus=config.serving.draft_gpus,
        target=engine.target,
        kv_bytes=sum(_kv_bytes(config, each) for each in (engine, draft) if each is not None),
        host_bytes=_host_bytes(config, engine),
        engine_path=ENGINE_DIRECTORY if engine.backend == "torch" else f"{config.serving_root.rstrip('/')}/{name}",
    )


def _kv_bytes(config: PackageConfig, engine: EngineFacts) -> int:
    """Bytes of a KV cache in host memory for `serving.kv_cache_tokens`, of all ranks; 0 if not set or unknown."""
    tokens = config.serving.kv_cache_tokens
    if tokens is None or engine.device != "cpu" or not engine.tokens_per_block:
        return 0
    return tokens // engine.tokens_per_block * engine.kv_block * engine.world_size


def _host_bytes(config: PackageConfig, engine: EngineFacts) -> int:
    """Bytes of each rank's host memory for KV blocks and adapters; a model.yaml may come with its own."""
    blocks, lora = config.serving.kv_cache_host_memory_bytes, engine.features.lora
    adapters = None if lora is None else lora.host_memory
    if engine.llm_args is not None:
        blocks = blocks or engine.llm_args.kv_cache_config.host_cache_size
        adapters = engine.llm_args.peft_cache_config.host_cache_size
    return (blocks or 0) + (adapters or 0)


def model_specs(
    config: PackageConfig, engine: EngineFacts, tokenizer: TokenizerAssets, draft: DraftEngine | None = None
) -> tuple[ModelSpec, ...]:
    """The five models, and the one of a draft engine. Raises ForgeError for a setting that the engine cannot serve."""
    facts = repository_facts(config, engine, None if draft is None else draft.facts)
    specs = _five(config, engine, tokenizer, facts)
    taken = next((spec.name for spec in specs if spec.name in engine.adapter_names), None)
    if taken is not None:
        raise ForgeError(
            f"{taken} is the name of a LoRA adapter of the engine, and of a model of the repository",
            hint="Give the models a prefix, or rename the adapter's directory and compile again.",
        )
    return specs if draft is None else (*specs, _draft_spec(config, draft, tokenizer))


def _draft_spec(config: PackageConfig, draft: DraftEngine, tokenizer: TokenizerAssets) -> ModelSpec:
    """The engine model of a draft engine: packaged as if alone, with another name."""
    alone = _five(draft.config, draft.facts, tokenizer, repository_facts(draft.config, draft.facts))
    spec = next(each for each in alone if each.role == "tensorrt_llm")
    name = f"{config.name_prefix}{DRAFT_MODEL}"
    path = f"{config.serving_root.rstrip('/')}/{name}/1/{ENGINE_DIRECTORY}"
    moved = {"drafts": "true"} if draft.facts.backend == "torch" else {"gpt_model_path": path}
    return replace(spec, name=name, parameters={**spec.parameters, **moved}, draft=True)


def _five(
    config: PackageConfig, engine: EngineFacts, tokenizer: TokenizerAssets, facts: RepositoryFacts
) -> tuple[ModelSpec, ...]:
    dtypes = DtypeChoices(
        logits=_DTYPES.get(engine.logits_dtype, "TYPE_FP32"), prompt_table=_DTYPES.get(engine.dtype, "TYPE_FP16")
    )
    flow = text_flow(engine.release)
    preprocessing, served = preprocessing_parameters(config, engine, tokenizer), request_parameters(config, engine)
    drafted = drafting_parameters(engine, facts)
    bls_flow = replace(flow, text_to_engine=(*flow.text_to_engine, *DRAFTING_INPUTS)) if drafted else flow
    bfloat16 = [t.name for t in _tensors("tensorrt_llm", "inputs", engine, dtypes, tokenizer) if t.dtype == _BFLOAT16]
    values: Mapping[ModelRole, Mapping[str, str]] = {
        "ensemble": text_parameters(config, facts, flow, preprocessing, tokenizer, bfloat16, by_text=False)
        | served
        | drafted,
        "preprocessing": preprocessing,
        "tensorrt_llm": engine_parameters(config, engine, facts, tokenizer) | served,
        "postprocessing": {"tokenizer_dir": TOKENIZER_DIRECTORY, "vocab_size": str(engine.vocab_size)},
        "tensorrt_llm_bls": text_parameters(config, facts, bls_flow, preprocessing, tokenizer, bfloat16, by_text=True)
        | served
        | drafted,
    }
    return tuple(
        ModelSpec(
            role=role,
            name=facts.model(role),
            backend="tensorrtllm" if role == "tensorrt_llm" and engine.backend == "tensorrt_llm" else "python",
            max_batch_size=engine.max_batch_size,
            decoupled=config.serving.streaming,
            max_queue_size=(
                queue_size(config.serving) if role == "tensorrt_llm" and engine.backend == "tensorrt_llm" else None
            ),
            inputs=_tensors(role, "inputs", engine, dtypes, tokenizer),
            outputs=_tensors(role, "outputs", engine, dtypes, tokenizer),
            parameters=values[role],
            code=model_code(role, engine.backend),
            instances=max(1, len(config.serving.instances)) if role == "tensorrt_llm" else 1,
        )
        for role in ROLES
    )


def _tensors(
    role: ModelRole, direction: Direction, engine: EngineFacts, dtypes: DtypeChoices, tokenizer: TokenizerAssets
) -> tuple[Tensor, ...]:
    """A model's tensors. Adapters have the engine's type, which the executor requires of them.

    For the embedded engine, `lora_config` may have the fourth column that later versions of `hf_lora_convert.py` write
    (whether the adapter is DoRA); TensorRT-LLM's own templates allow three.
    Text models and the embedded engine take float16 in place of bfloat16, which numpy lacks, and convert it. Sources:
    TensorRT-LLM issue #2434 (`loraValidateRequestTensors` in cpp/tensorrt_llm/runtime/loraUtils.cpp),
    tensorrtllm_backend issue #403.
    """
    if dtypes.prompt_table == _BFLOAT16 and (role in TEXT_ROLES or engine.backend == "torch"):
        dtypes = replace(dtypes, prompt_table="TYPE_FP16")
    declared = tensors(role, direction, engine.release, dtypes)
    if engine.backend == "torch":
        declared = tuple(replace(each, dims=(-1, -1)) if each.name == "lora_config" else each for each in declared)
    if role in TEXT_ROLES:
        return with_text_tensors(declared, direction, chat=tokenizer.chat is not None)
    if engine.backend != "tensorrt_llm":
        return declared
    own = _DTYPES.get(engine.dtype, "TYPE_FP16")
    return tuple(replace(tensor, dtype=own) if tensor.name == "lora_weights" else tensor for tensor in declared)


def model_code(role: ModelRole, backend: str) -> ModelCode:
    """The code of a role's Python model with an engine of this backend."""
    if role == "tensorrt_llm" and backend == "llmapi":
        return "llmapi"
    return "triton" if role in ("ensemble", "tensorrt_llm_bls") and backend == "tensorrt_llm" else "1"
