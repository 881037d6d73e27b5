"""Rules for migrating every setting of an engine and of the model that serves it, as tables.

Sources: `BuildConfig`, `PluginConfig` and `PretrainedConfig` (tensorrt_llm/builder.py, plugin/plugin.py,
models/modeling_utils.py, 1.2), the parameters of the tensorrt_llm model (triton_backend/all_models, 1.2), and the LLM
API's arguments (tensorrt_llm/llmapi/llm_args.py, 1.2 and 1.3).
"""

from dataclasses import dataclass
from typing import Literal

from trtforge.core.serving import ServingConfig

Kind = Literal["integer", "number", "flag", "integers", "words", "text", "scheduler", "fp8", "present"]
"""How a value is read: `integers` and `words` are comma-separated or lists, `fp8` is a KV cache algorithm, `present`
is true for any value."""


@dataclass(frozen=True)
class Carry:
    """The setting becomes the LLM argument `to`; `when`: only if that setting is set too.

    `note`: a remark for the user, listed under "needs attention".
    """

    key: str
    to: str
    kind: Kind
    when: str = ""
    note: str = ""


@dataclass(frozen=True)
class Drop:
    """The setting has no equivalent and needs none."""

    key: str
    why: str


@dataclass(frozen=True)
class Attend:
    """The user must decide, unless the value is one of `neutral`; then it is dropped for the same reason."""

    key: str
    why: str
    neutral: tuple[object, ...] = (None, "", 0, False)


Rule = Carry | Drop | Attend

_LORA = "build_config.plugin_config.lora_plugin"
_NO_ADAPTERS = (
    "repositories of `trtforge package` ignore adapters of requests, the base model answers; serve model.yaml with "
    "an LLM API server that takes LoRA requests, or merge the adapter into the checkpoint"
)
_OLD_PATHS = "these are paths of the machine that built the engine: edit lora_config.lora_dir for the serving machine"
_ALWAYS_PAGED = "the PyTorch backend's KV cache is always paged and its input always packed"
_BEAMS = (
    "the PyTorch backend refuses every request whose beam width is not max_beam_width, so the LLM serves single "
    "answers: set it only for clients that all search with this width"
)
"""`_validate_request` in tensorrt_llm/_torch/pyexecutor/py_executor.py, 1.3.0rc3."""
_NO_BUILD = "TensorRT's builder used it; the LLM API builds no engine"
_SPECULATION = "speculative decoding is configured by speculative_config, with a model that the backend supports"

ENGINE: tuple[Rule, ...] = (
    Carry("pretrained_config.mapping.tp_size", "tensor_parallel_size", "integer"),
    Carry("pretrained_config.mapping.pp_size", "pipeline_parallel_size", "integer"),
    Carry("pretrained_config.mapping.cp_size", "context_parallel_size", "integer"),
    Carry("pretrained_config.mapping.moe_tp_size", "moe_tensor_parallel_size", "integer"),
    Carry("pretrained_config.mapping.moe_ep_size", "moe_expert_parallel_size", "integer"),
    Carry("pretrained_config.dtype", "dtype", "text"),
    Carry("pretrained_config.quantization.kv_cache_quant_algo", "kv_cache_config.dtype", "fp8"),
    Attend(
        "pretrained_config.quantization.quant_algo",
        "the LLM API takes the weights' format from the checkpoint: use one that is quantised like the engine "
        "(trtforge build with engine.backend llmapi, or ModelOpt's Hugging Face export)",
    ),
    Carry("build_config.max_batch_size", "max_batch_size", "integer"),
    Carry("build_config.max_input_len", "max_input_len", "integer"),
    Carry("build_config.max_seq_len", "max_seq_len", "integer"),
    Carry("build_config.max_num_tokens", "max_num_tokens", "integer"),
    Attend("build_config.max_beam_width", _BEAMS, (None, 0, 1)),
    Carry("build_config.plugin_config.tokens_per_block", "kv_cache_config.tokens_per_block", "integer"),
    Carry("forge.features.kv_reuse", "kv_cache_config.enable_block_reuse", "flag"),
    Carry("forge.features.chunked_context", "enable_chunked_prefill", "flag"),
    Drop("build_config.plugin_config.use_paged_context_fmha", "the PyTorch backend's attention reads the paged cache"),
    Carry("build_config.gather_generation_logits", "gather_generation_logits", "flag"),
    Carry(_LORA, "enable_lora", "present", note=_NO_ADAPTERS),
    Carry("build_config.lora_config.lora_dir", "lora_config.lora_dir", "words", _LORA, _OLD_PATHS),
    Carry("build_config.lora_config.max_lora_rank", "lora_config.max_lora_rank", "integer", _LORA),
    Carry("build_config.lora_config.lora_target_modules", "lora_config.lora_target_modules", "words", _LORA),
    Drop("build_config.kv_cache_type", _ALWAYS_PAGED),
    Drop("build_config.opt_batch_size", _NO_BUILD),
    Drop("build_config.opt_num_tokens", _NO_BUILD),
    Drop("build_config.strongly_typed", _NO_BUILD),
    Attend("build_config.gather_context_logits", "context logits are requested per request (return_context_logits)"),
    Attend("build_config.speculative_decoding_mode", _SPECULATION, (None, 1, "NONE", "SpeculativeDecodingMode.NONE")),
    Attend("build_config.max_draft_len", _SPECULATION),
    Attend("build_config.max_prompt_embedding_table_size", "the PyTorch backend has no prompt tuning tables"),
    Attend("build_config.max_encoder_input_len", "encoder-decoder models are not migrated", (None, 0, 1, 1024)),
    Attend(
        "build_config.weight_streaming",
        "the PyTorch backend keeps all weights on the GPU: plan for more memory or more GPUs",
    ),
    Drop("version", "the release that built the engine; any release with the LLM API serves the checkpoint"),
)
SECTIONS: tuple[tuple[str, str], ...] = (
    ("build_config.plugin_config.", "a choice of TensorRT's kernels; the PyTorch backend chooses its own"),
    ("build_config.lora_config.", "no LoRA plugin: the engine takes no adapters"),
    ("build_config.", _NO_BUILD),
    ("pretrained_config.", "config.json of the Hugging Face checkpoint describes the network"),
    ("forge.", "a setting of the embedded engine"),
)
"""Why an engine's other settings are dropped, by name prefix."""

REPOSITORY: tuple[Rule, ...] = (
    Carry("batch_scheduler_policy", "scheduler_config.capacity_scheduler_policy", "scheduler"),
    Carry("kv_cache_free_gpu_mem_fraction", "kv_cache_config.free_gpu_memory_fraction", "number"),
    Carry("max_tokens_in_paged_kv_cache", "kv_cache_config.max_tokens", "integer"),
    Carry("kv_cache_host_memory_bytes", "kv_cache_config.host_cache_size", "integer"),
    Carry("enable_kv_cache_reuse", "kv_cache_config.enable_block_reuse", "flag"),
    Carry("max_attention_window_size", "kv_cache_config.max_attention_window", "integers"),
    Carry("sink_token_length", "kv_cache_config.sink_token_length", "integer"),
    Carry("enable_chunked_context", "enable_chunked_prefill", "flag"),
    Attend("max_beam_width", _BEAMS, (None, "", "0", "1")),
    Carry("guided_decoding_backend", "guided_decoding_backend", "text"),
    Carry("iter_stats_max_iterations", "iter_stats_max_iterations", "integer"),
    Carry("request_stats_max_iterations", "request_stats_max_iterations", "integer"),
    Carry("lora_cache_optimal_adapter_size", "peft_cache_config.optimal_adapter_size", "integer"),
    Carry("lora_cache_max_adapter_size", "peft_cache_config.max_adapter_size", "integer"),
    Carry("lora_cache_gpu_memory_fraction", "peft_cache_config.device_cache_percent", "number"),
    Carry("lora_cache_host_memory_bytes", "peft_cache_config.host_cache_size", "integer"),
    Carry("cancellation_check_period_ms", "triton_config.cancellation_check_period_ms", "integer"),
    Drop("gpt_model_path", "there is no engine to load"),
    Drop("executor_worker_path", "the LLM API starts its own processes"),
    Drop("participant_ids", "the LLM API starts its own processes"),
    Drop("FORCE_CPU_ONLY_INPUT_TENSORS", "a setting of the C++ backend"),
    Drop("stats_check_period_ms", "a setting of the C++ backend"),
    Drop("recv_poll_period_ms", "a setting of the C++ backend"),
    Drop("kv_cache_onboard_blocks", "later LLM APIs have no such argument: blocks are always onboarded"),
    Drop("enable_context_fmha_fp32_acc", "a choice of TensorRT's kernels"),
    Drop("multi_block_mode", "a choice of TensorRT's kernels"),
    Drop("cuda_graph_mode", "the PyTorch backend uses CUDA graphs by default (cuda_graph_config)"),
    Drop("cuda_graph_cache_size", "the PyTorch backend uses CUDA graphs by default (cuda_graph_config)"),
    Drop("enable_trt_overlap", "the PyTorch backend overlaps scheduling by default (disable_overlap_scheduler)"),
    Drop("xgrammar_tokenizer_info_path", "the LLM API uses the checkpoint's tokenizer"),
    Drop("tokenizer_dir", "the LLM API uses the checkpoint's tokenizer"),
    Drop("prompt_embedding_table_data_type", "the dtype of an input of the C++ backend"),
    Drop("logits_datatype", "the dtype of an output of the C++ backend"),
    Attend(
        "gpt_model_type",
        "the LLM API always uses in-flight batching",
        (None, "", "inflight_fused_batching", "inflight_batching"),
    ),
    Attend(
        "decoding_mode",
        _SPECULATION,
        (None, "", "auto", "top_k", "top_p", "top_k_top_p", "beam_search"),
    ),
    *(
        Attend(key, _SPECULATION, (None, ""))
        for key in (
            "medusa_choices",
            "eagle_choices",
            "lookahead_window_size",
            "lookahead_ngram_size",
            "lookahead_verification_set_size",
        )
    ),
    Attend("speculative_decoding_fast_logits", _SPECULATION, (None, "", "false", "False", "0")),
    Attend("encoder_model_path", "encoder-decoder models are not migrated", (None, "")),
    Attend("cross_kv_cache_fraction", "encoder-decoder models are not migrated", (None, "")),
    Attend(
        "lora_prefetch_dir", "the LLM API refuses prefetching: name the adapters in lora_config.lora_dir", (None, "")
    ),
    Attend(
        "gpu_weights_percent",
        "the PyTorch backend keeps all weights on the GPU: plan for more memory or more GPUs",
        (None, "", "1", "1.0"),
    ),
    # Parameters that only repositories of `trtforge package` have.
    Drop("end_ids", "the LLM API reads the end ids of the checkpoint"),
    Drop("vocab_size", "config.json of the Hugging Face checkpoint describes the network"),
    Attend(
        "max_queue_size",
        "package with --set serving.max_queue_size=N to keep it",
        (None, "", "0", str(ServingConfig().max_queue_size)),
    ),
    Attend("max_queue_seconds", "package with --set serving.max_queue_seconds=N to keep it", (None, "")),
    Attend("gpu_device_ids", "choose the GPUs with CUDA_VISIBLE_DEVICES", (None, "")),
    Attend("num_nodes", "several nodes are started by the LLM API's launcher (trtllm-llmapi-launch)", (None, "", "1")),
    Attend("normalize_log_probs", "the LLM API's log probabilities are never normalised", (None, "", "false", "False")),
    Attend(
        "exclude_input_in_output",
        "clients choose per request; package sets the default (--set serving.exclude_input_in_output=false)",
        (None, "", "true", "True", "1"),
    ),
)
