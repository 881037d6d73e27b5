"""The arguments of TensorRT-LLM's LLM API that follow from features, and the rules of these features.

Sources: tensorrt_llm/llmapi/llm_args.py and py_executor_creator.py; per release `formats/release_data/llmapi.json`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.features import OF_ENGINES, SPECULATION, FeaturesConfig, SpeculationMethod
from trtforge.core.recipe import EngineConfig
from trtforge.formats.llmapi import LlmArgs, at_least, has_argument, network_since, require_llm_api, speculation_row
from trtforge.models.registry import WITH_STATES, WITH_VISION_ONLY
from trtforge.plan.gpus import gpu_named
from trtforge.plan.legality import Problem

DRAFT_DIRECTORY = "draft"
"""Where an engine of the LLM API keeps its draft model."""
_CHUNKS_WITH_DRAFTS = 100
"""The compute capability x 10 from which attention in chunks works with speculation."""
_SINCE_STATES = "1.2"
"""The first line of releases whose PyTorch backend has linear attention (examples of 1.2.0rc0.post1 run Qwen3-Next)."""
_SINCE_MORE = "1.3"
"""The first line whose linear attention works with data parallelism and with MTP, and whose CUDA graphs are known to
support adapters (CudaGraphLoraManager in 1.3.0rc3)."""
_GREEDY = ("eagle3", "mtp")
"""The methods with their own samplers, which are greedy unless configured otherwise."""
GRAPH_BYTES = 200_000_000
"""The most GPU memory of one CUDA graph, by the description of `cuda_graph_config`."""


@dataclass(frozen=True)
class LlmApiModel:
    """Facts of a model and its layout that the rules need; None: unknown. `chunk`: tokens of a chunk of Llama 4's
    attention, 0 without."""

    tp: int
    has_experts: bool | None = None
    mtp_layers: int | None = None
    architecture: str = ""
    chunk: int = 0
    pp: int = 1

    @property
    def shares_blocks(self) -> bool:
        """Whether requests can share KV blocks, that is, whether a sequence has no state outside them."""
        return self.architecture not in WITH_STATES


def feature_arguments(features: FeaturesConfig, version: str) -> Mapping[str, Any]:
    """The arguments that the features set, by dotted key; `features.lora` is resolved.

    Raises ForgeError for a method of speculation that the release does not have.
    """
    values: dict[str, Any] = {}
    if features.generation_logits:
        values["gather_generation_logits"] = True
    lora, moe, attention, graphs = features.lora, features.moe, features.attention_dp, features.cuda_graphs
    if lora is not None:
        values |= {
            "enable_lora": True,
            "lora_config.max_lora_rank": lora.max_rank,
            "lora_config.lora_target_modules": lora.modules,
            "peft_cache_config.optimal_adapter_size": lora.max_rank,
            "peft_cache_config.max_adapter_size": lora.max_rank,
            "peft_cache_config.device_cache_percent": lora.gpu_fraction,
            "peft_cache_config.host_cache_size": lora.host_memory,
        }
    if moe is not None:
        values |= {"moe_config.backend": moe.backend, "moe_config.max_num_tokens": moe.max_num_tokens}
    if attention is not None:
        values["enable_attention_dp"] = True
        if attention.balance:
            values |= {
                "attention_dp_config.enable_balance": True,
                "attention_dp_config.timeout_iters": attention.timeout_iters,
                "attention_dp_config.batching_wait_iters": attention.batching_wait_iters,
            }
    if (graphs is not None and not graphs.enabled) or (graphs is None and _without_graphs(features, version)):
        values["cuda_graph_config"] = None
    elif graphs is not None:
        values |= {
            "cuda_graph_config.batch_sizes": graphs.batch_sizes,
            "cuda_graph_config.max_batch_size": graphs.max_batch_size,
            "cuda_graph_config.enable_padding": graphs.padding,
        }
    return values | _speculative(features, version)


def _without_graphs(features: FeaturesConfig, version: str) -> bool:
    """Whether CUDA graphs must be off because of adapters: graphs are on by default, and those of releases before 1.3
    do not support adapters (TensorRT-LLM's pull requests 5480 of July 2025 and 8279)."""
    return features.lora is not None and not at_least(version, _SINCE_MORE)


def sampler_arguments(features: FeaturesConfig, version: str) -> Mapping[str, Any]:
    """The arguments of a release whose default sampler always takes the likeliest token, whatever the request's
    parameters.

    Release 1.0 has such a sampler (`_process_requests` of TorchSampler, _torch/pyexecutor/sampler.py). TRTLLMSampler
    supports all parameters of requests but no draft tokens; EAGLE-3 and MTP have their own samplers, which are greedy.
    """
    method = _method(features)
    if method in _GREEDY:
        return {}
    name = "enable_trtllm_sampler" if method is None else "enable_mixed_sampler"
    return {name: True} if has_argument(version, name) else {}


def _speculative(features: FeaturesConfig, version: str) -> dict[str, Any]:
    method = _method(features)
    if method is None or method in OF_ENGINES:
        return {}
    row = speculation_row(version, method)
    if row is None:
        raise ForgeError(f"TensorRT-LLM {version}: its LLM API has no {method}", hint="Leave it out.")
    values: dict[str, Any] = {"decoding_type": row.decoding_type}
    if row.model is not None:
        values[row.model] = DRAFT_DIRECTORY
    if features.draft is not None:
        values |= {row.tokens: features.draft.tokens}
    for found in (features.eagle3, features.mtp, features.ngram):
        if found is not None:
            values |= {row.tokens: found.draft_tokens, "max_concurrency": found.max_requests}
    if features.ngram is not None:
        values["max_matching_ngram_size"] = features.ngram.matching
    if method in _GREEDY and has_argument(version, "speculative_config.allow_advanced_sampling"):
        values["allow_advanced_sampling"] = True
    return {f"speculative_config.{key}": value for key, value in values.items()}


def draft_source(features: FeaturesConfig) -> str | None:
    """The draft model's hub id or directory that becomes part of an engine of the LLM API; None without one."""
    if features.draft is not None:
        return features.draft.model
    return features.eagle3.model if features.eagle3 is not None else None


def llm_api_problems(engine: EngineConfig, model: LlmApiModel) -> Iterator[Problem]:
    """Errors and warnings for the features of an engine of the LLM API; `engine.features.lora` is resolved."""
    features, version = engine.features, engine.target.tensorrt_llm
    yield from _network_problems(model.architecture, version)
    yield from _llama4_problems(engine, model)
    yield from _state_problems(engine, model)
    if model.architecture == "GptOssForCausalLM" and model.pp > 1:
        # an assertion in `GptOssForCausalLM` (_torch/models/modeling_gpt_oss.py, 1.2)
        message = f"pp {model.pp}: TensorRT-LLM's GPT-OSS has no pipeline parallelism"
        yield Problem("pipeline", message, "Use --pp 1 and a larger --tp.")
    for name in OF_ENGINES:
        if name in features.beyond_paging:
            message = f"engine.features.{name}: not supported by the llmapi backend"
            yield Problem("backend", message, "Leave it out, or use engine.backend: tensorrt_llm.")
    yield from _argument_problems(features, version)
    yield from _speculation_problems(features, model)
    if features.moe is not None and model.has_experts is False:
        yield Problem("moe", "engine.features.moe: the model has no experts", "Leave it out.")
    if features.attention_dp is not None and model.tp == 1:
        message = "engine.features.attention_dp: tp is 1, so there is one GPU for every request's attention"
        yield Problem("attention_dp", message, "Use a higher tp, or leave it out.")
    elif features.attention_dp is not None:
        message = "engine.features.attention_dp: memory and times are planned with attention split by heads"
        fix = "Each GPU holds the attention weights of all heads, and the whole KV cache of its own requests."
        yield Problem("attention_dp", message, fix, refuses=False)
    graphs = features.cuda_graphs
    if graphs is not None and graphs.enabled and _without_graphs(features, version):
        message = f"engine.features.cuda_graphs: in TensorRT-LLM {version} they ignore LoRA adapters"
        yield Problem("cuda_graphs", message, "Leave it out: engine.features.lora turns CUDA graphs off.")
    largest = max(graphs.batch_sizes or (graphs.max_batch_size or 0,)) if graphs is not None else 0
    if largest > engine.max_batch_size:
        message = f"engine.features.cuda_graphs: batch size {largest} exceeds engine.max_batch_size"
        yield Problem(
            "cuda_graphs", message, f"TensorRT-LLM records no CUDA graphs above {engine.max_batch_size}.", refuses=False
        )
    if graphs is not None and graphs.batch_sizes is not None:
        most = len(graphs.batch_sizes) * GRAPH_BYTES // 10**6
        message = f"engine.features.cuda_graphs: {len(graphs.batch_sizes)} graphs take up to {most} MB of GPU memory"
        yield Problem(
            "cuda_graphs", message, "Lower serving.kv_cache_fraction if the server needs more.", refuses=False
        )


def _network_problems(architecture: str, version: str) -> Iterator[Problem]:
    try:
        since = network_since(architecture)
    except ForgeError as error:
        yield Problem("architecture", error.message, error.hint)
        return
    if since is not None and not at_least(version, since):
        message = f"TensorRT-LLM {version}: its PyTorch backend has no network for {architecture}"
        yield Problem("architecture", message, f"Use TensorRT-LLM {since}.x or later.")


def _llama4_problems(engine: EngineConfig, model: LlmApiModel) -> Iterator[Problem]:
    """Source: tensorrt_llm/_torch/models/modeling_llama.py (1.2), the registered classes and Llama4Attention."""
    if model.architecture in WITH_VISION_ONLY:
        message = "TensorRT-LLM runs Llama 4 with its vision part only (Llama4ForConditionalGeneration)"
        yield Problem("architecture", message, "Use the checkpoint as it is published, or engine.backend: torch.")
    if model.architecture == "Llama4ForConditionalGeneration" and engine.features.lora is not None:
        message = "engine.features.lora: not supported by TensorRT-LLM's attention of Llama 4"
        yield Problem("lora", message, "Leave it out.")
    method = _method(engine.features)
    longer = model.chunk and (engine.max_seq_len is None or engine.max_seq_len > model.chunk)
    gpu = None if engine.target.gpu is None else gpu_named(engine.target.gpu)
    if method is not None and longer and (gpu is None or gpu.sm < _CHUNKS_WITH_DRAFTS):
        message = (
            f"engine.features.{method}: before Blackwell, TensorRT-LLM then attends to all tokens, not to chunks of "
            f"{model.chunk:,}: beyond them answers differ from the model's"
        )
        yield Problem("chunks", message, f"Use max_seq_len {model.chunk}, or leave it out.", refuses=False)


def _state_problems(engine: EngineConfig, model: LlmApiModel) -> Iterator[Problem]:
    """Linear attention: docs/source/models/supported-models.md of 1.2 (its matrix of features), pull request 7892 of
    September 2025, 10218 (attention data parallelism, 1.3.0rc9) and 12646 of April 2026 (MTP)."""
    if model.shares_blocks:
        return
    version, features = engine.target.tensorrt_llm, engine.features
    if not at_least(version, _SINCE_STATES):
        message = f"TensorRT-LLM {version}: its PyTorch backend is not known to support {model.architecture}"
        yield Problem("architecture", message, f"Use TensorRT-LLM {_SINCE_STATES}.x or later.", refuses=False)
    if features.lora is not None:
        message = f"engine.features.lora: TensorRT-LLM is not known to support adapters for {model.architecture}"
        yield Problem("lora", message, "Leave it out.")
    method, known = _method(features), at_least(version, _SINCE_MORE)
    for name in ("attention_dp", "mtp", "eagle3"):
        if getattr(features, name) is not None and not known:
            message = f"engine.features.{name}: not supported by TensorRT-LLM {version} for {model.architecture}"
            yield Problem("states", message, f"Leave it out, or use TensorRT-LLM {_SINCE_MORE}.x.")
    if method is not None:
        message = f"engine.features.{method}: not every release of TensorRT-LLM can undo what rejected drafts "
        fix = "Compare answers with and without it, or leave it out."
        yield Problem("states", f"{message}change in the states of linear attention", fix, refuses=False)


def _argument_problems(features: FeaturesConfig, version: str) -> Iterator[Problem]:
    try:
        require_llm_api(version, LlmArgs().with_values(feature_arguments(features, version), "features"))
    except ForgeError as error:
        yield Problem("release", error.message, error.hint)


def _speculation_problems(features: FeaturesConfig, model: LlmApiModel) -> Iterator[Problem]:
    if features.draft is not None and features.draft.model is None:
        message = "engine.features.draft: the LLM API runs the draft model itself, and draft.model is not set"
        yield Problem("draft", message, "Set engine.features.draft.model.")
    method = _method(features)
    if method in _GREEDY and model.pp > 1:
        # docs/source/features/feature-combination-matrix.md, 1.3.0rc3
        message = f"engine.features.{method}: not supported with pp {model.pp}, by TensorRT-LLM's documentation"
        yield Problem("speculation", message, "Use --pp 1 and a larger --tp, or leave it out.", refuses=False)
    if features.mtp is not None and model.mtp_layers == 0:
        message = "engine.features.mtp: the model has no MTP layers (num_nextn_predict_layers)"
        yield Problem("speculation", message, "Use engine.features.ngram, which needs no weights.")


def _method(features: FeaturesConfig) -> SpeculationMethod | None:
    return next((name for name in SPECULATION if getattr(features, name) is not None), None)
