"""TensorRT-LLM's LlmArgs as far as trtforge writes it, by release: strict, with the fields and checks of each release.

Read in tensorrt_llm/llmapi/llm_args.py of August 2025 (1.0), of 1.2.0rc4 and of release candidates of 1.3.0, apart from
`release_data/llmapi.json`, so that each checks the other. 1.1 is 1.0 with what pull requests 5911, 6061 and the first
GPT-OSS support added. Other fields of these classes are left out: a key that only they have is refused here.
"""

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model, model_validator

VERSIONS = ("1.0.0", "1.1.0", "1.2.1", "1.3.0")
Fields = Mapping[str, Any]

_MOE = ("CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA")
_MOE_BACKENDS = {
    "1.0": _MOE,
    "1.1": (*_MOE, "TRITON"),
    "1.2": (*_MOE, "TRITON"),
    "1.3": (*_MOE, "AUTO", "DENSEGEMM", "TRITON", "MARLIN", "MEGAMOE_DEEPGEMM"),
}


class Strict(BaseModel):
    """TensorRT-LLM's StrictBaseModel."""

    model_config = ConfigDict(extra="forbid")


def _optional(kind: Any) -> tuple[Any, None]:
    return (kind | None, None)


class _Graphs(Strict):
    batch_sizes: list[int] | None = None
    max_batch_size: int = Field(0, ge=0)
    enable_padding: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "_Graphs":
        if self.batch_sizes and self.max_batch_size not in (0, max(self.batch_sizes)):
            raise ValueError("Please don't set both cuda_graph_config.batch_sizes and max_batch_size.")
        return self


def _drafting(line: str) -> dict[str, type[Strict]]:
    """The configuration classes by name. Up to 1.2 `decoding_type` is no field, so a dictionary with it is refused."""
    base: dict[str, Any] = {"max_draft_len": _optional(int)}
    if line in ("1.2", "1.3"):
        base["max_concurrency"] = _optional(int)
    if line == "1.3":
        base["allow_advanced_sampling"] = (bool, False)
        names = AliasChoices("speculative_model", "speculative_model_dir")
        base["speculative_model"] = (str | None, Field(None, validation_alias=names))
    else:
        base["speculative_model_dir"] = _optional(str)
    own: dict[str, tuple[str, dict[str, Any]]] = {
        "DraftTargetDecodingConfig": ("Draft_Target", {}),
        "EagleDecodingConfig": ("Eagle", {}),
        "MTPDecodingConfig": ("MTP", {"num_nextn_predict_layers": (int, 1)}),
        "NGramDecodingConfig": ("NGram", {"max_matching_ngram_size": (int, Field(2, ge=1))}),
    }
    if line == "1.3":
        own["Eagle3DecodingConfig"] = ("Eagle3", {})
    made = {}
    for name, (method, fields) in own.items():
        typed = {"decoding_type": (Literal[method], method)} if line == "1.3" else {}
        made[name] = create_model(name, __base__=_checked(name), **base, **fields, **typed)
    return made


def _checked(name: str) -> type[Strict]:
    """The checks that some releases do when the class is made and others when the model is loaded."""
    needs_model = name in ("DraftTargetDecodingConfig", "EagleDecodingConfig", "Eagle3DecodingConfig")

    class Checked(Strict):
        @model_validator(mode="after")
        def _complete(self) -> "Checked":
            values = dict(self)
            if needs_model and not (values.get("speculative_model") or values.get("speculative_model_dir")):
                raise ValueError("Draft model must be provided")
            if name != "MTPDecodingConfig" and not values["max_draft_len"]:
                raise ValueError(f"max_draft_len must be > 0 for {name}")
            return self

    return Checked


@cache
def classes(version: str) -> Mapping[str, type[Strict]]:
    """The classes of a release by name; `TorchLlmArgs` is the whole."""
    line = ".".join(version.split(".")[:2])
    drafting = _drafting(line)
    moe = {"backend": (Literal[_MOE_BACKENDS[line]], "CUTLASS"), "max_num_tokens": _optional(int)}
    balance = {"enable_balance": (bool, False), "timeout_iters": (int, 50), "batching_wait_iters": (int, 10)}
    cache: dict[str, Any] = {
        "enable_block_reuse": (bool, True),
        "max_tokens": _optional(int),
        "max_attention_window": _optional(list[int]),
        "sink_token_length": _optional(int),
        "free_gpu_memory_fraction": _optional(float),
        "host_cache_size": _optional(int),
        "dtype": (str, "auto"),
    }
    if line != "1.0":
        cache["tokens_per_block"] = (int, 32)
    lora = {
        "lora_dir": (list[str], []),
        "max_lora_rank": (int, 64),
        "lora_target_modules": (list[str], []),
    }
    adapters = {
        "optimal_adapter_size": (int, 8),
        "max_adapter_size": (int, 64),
        "device_cache_percent": (float, 0.02),
        "host_cache_size": (int, 1 << 30),
    }
    policy = {"capacity_scheduler_policy": (Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"], "")}
    speculative: Any = None
    for each in drafting.values():
        speculative = each if speculative is None else speculative | each
    found: dict[str, Any] = {
        **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"), (int, 1)),
        **dict.fromkeys(("moe_tensor_parallel_size", "moe_expert_parallel_size", "max_batch_size"), _optional(int)),
        **dict.fromkeys(("max_input_len", "max_seq_len", "max_beam_width", "max_num_tokens"), _optional(int)),
        **dict.fromkeys(("iter_stats_max_iterations", "request_stats_max_iterations"), _optional(int)),
        **dict.fromkeys(("trust_remote_code", "enable_attention_dp", "enable_lora"), (bool, False)),
        **dict.fromkeys(("enable_chunked_prefill", "gather_generation_logits"), (bool, False)),
        "model": (str, ...),
        "backend": (Literal["pytorch"], "pytorch"),
        "dtype": (str, "auto"),
        "guided_decoding_backend": _optional(Literal["xgrammar", "llguidance"]),
        "lora_config": _optional(create_model("LoraConfig", __base__=Strict, **lora)),
        "kv_cache_config": _optional(create_model("KvCacheConfig", __base__=Strict, **cache)),
        "peft_cache_config": _optional(create_model("PeftCacheConfig", __base__=Strict, **adapters)),
        "scheduler_config": _optional(create_model("SchedulerConfig", __base__=Strict, **policy)),
        "moe_config": _optional(create_model("MoeConfig", __base__=Strict, **moe)),
        "cuda_graph_config": (_Graphs | None, Field(default_factory=_Graphs)),
        "speculative_config": _optional(speculative),
    }
    if line == "1.0":
        found |= dict.fromkeys(("enable_trtllm_sampler", "enable_mixed_sampler"), (bool, False))
    if line != "1.0":
        found["attention_dp_config"] = _optional(create_model("AttentionDpConfig", __base__=Strict, **balance))
    return {**drafting, "TorchLlmArgs": create_model("TorchLlmArgs", __base__=Strict, **found)}


def installed(version: str) -> dict[str, ModuleType]:
    """`tensorrt_llm.llmapi.llm_args` of a release, with its parents, for `sys.modules`."""
    package, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    args = ModuleType("tensorrt_llm.llmapi.llm_args")
    vars(args).update(classes(version))
    vars(package)["llmapi"], vars(api)["llm_args"] = api, args
    return {module.__name__: module for module in (package, api, args)}
