"""What TensorRT-LLM's own classes declare, copied name by name: the truth that the release data is held against.

BUILD_CONFIG: `class BuildConfig` in tensorrt_llm/builder.py at commits 008b2b8d (between 0.19.0 and 1.0.0) and
2a9abd95 (main after 1.0.0), which agree; `auto_parallel_config` left with PR #8329 (1.2). Engines of 0.17.0.post1
carry the same names. PLUGIN_CONFIG: `class PluginConfig` in tensorrt_llm/plugin/plugin.py at commit c20322ff (1.2,
pydantic); NEWER_PLUGINS are not in that of 0.17.0.post1 (commit 258c7540), OLDER_PLUGINS not in that of 1.2.
LORA_CONFIG: `class LoraConfig` in tensorrt_llm/lora_manager.py, as every release has it.
"""

from typing import Any

INTEGER, BOOLEAN, TEXT = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
MAYBE_INTEGER, MAYBE_TEXT = {"type": ["integer", "null"]}, {"type": ["string", "null"]}
TEXTS = {"type": "array", "items": TEXT}
PLUGIN = {"enum": ["auto", "float16", "float32", "bfloat16", "int32", None]}
ONLY_FP8 = {"enum": ["fp8", None]}
POSITIVE = {"type": "integer", "minimum": 1}

BUILD_CONFIG: dict[str, Any] = {
    "max_input_len": POSITIVE,
    "max_seq_len": {"type": ["integer", "null"], "minimum": 2},
    "opt_batch_size": POSITIVE,
    "max_batch_size": POSITIVE,
    "max_beam_width": POSITIVE,
    "max_num_tokens": POSITIVE,
    "opt_num_tokens": MAYBE_INTEGER,
    "max_prompt_embedding_table_size": INTEGER,
    "kv_cache_type": {"enum": ["CONTINUOUS", "PAGED", "DISABLED", None]},
    "gather_context_logits": BOOLEAN,
    "gather_generation_logits": BOOLEAN,
    "strongly_typed": BOOLEAN,
    "force_num_profiles": MAYBE_INTEGER,
    "profiling_verbosity": {"enum": ["layer_names_only", "detailed", "none"]},
    "enable_debug_output": BOOLEAN,
    "max_draft_len": {"type": "integer", "minimum": 0},
    "speculative_decoding_mode": {"enum": [1, 2, 4, 8, 16, 32]},
    "use_refit": BOOLEAN,
    "input_timing_cache": MAYBE_TEXT,
    "output_timing_cache": TEXT,
    "lora_config": {"$ref": "#/$defs/lora_config"},
    "weight_sparsity": BOOLEAN,
    "weight_streaming": BOOLEAN,
    "plugin_config": {"$ref": "#/$defs/plugin_config"},
    "use_strip_plan": BOOLEAN,
    "max_encoder_input_len": INTEGER,
    "dry_run": BOOLEAN,
    "visualize_network": MAYBE_TEXT,
    "monitor_memory": BOOLEAN,
    "use_mrope": BOOLEAN,
}
UNTIL_1_1 = {"auto_parallel_config": {"type": "object"}}

PLUGIN_CONFIG: dict[str, Any] = {
    "dtype": {"enum": ["float16", "float32", "bfloat16"]},
    **dict.fromkeys(
        (
            "bert_attention_plugin", "gpt_attention_plugin", "fp8_rowwise_gemm_plugin", "qserve_gemm_plugin",
            "identity_plugin", "nccl_plugin", "lora_plugin", "weight_only_groupwise_quant_matmul_plugin",
            "weight_only_quant_matmul_plugin", "smooth_quant_gemm_plugin", "layernorm_quantization_plugin",
            "rmsnorm_quantization_plugin", "moe_plugin", "mamba_conv1d_plugin",
        ),
        PLUGIN,
    ),
    "gemm_plugin": {"enum": ["auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", None]},
    **dict.fromkeys(("gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin"), ONLY_FP8),
    "paged_kv_cache": {"type": ["boolean", "null"]},
    "tokens_per_block": POSITIVE,
    **dict.fromkeys(
        (
            "smooth_quant_plugins", "quantize_per_token_plugin", "quantize_tensor_plugin", "context_fmha",
            "bert_context_fmha_fp32_acc", "remove_input_padding", "reduce_fusion", "user_buffer",
            "use_paged_context_fmha", "use_fp8_context_fmha", "multiple_profiles", "paged_state", "streamingllm",
            "manage_weights", "use_fused_mlp", "pp_reduce_scatter",
        ),
        BOOLEAN,
    ),
}  # fmt: skip
NEWER_PLUGINS: dict[str, Any] = {
    "dora_plugin": BOOLEAN,
    "gemm_allreduce_plugin": {"enum": ["float16", "bfloat16", None]},
    "norm_quant_fusion": BOOLEAN,
    "fuse_fp4_quant": BOOLEAN,
}
OLDER_PLUGINS: dict[str, Any] = {"explicitly_disable_gemm_plugin": BOOLEAN}

LORA_CONFIG: dict[str, Any] = {
    "lora_dir": TEXTS,
    "lora_ckpt_source": {"enum": ["hf", "nemo"]},
    "max_lora_rank": POSITIVE,
    "lora_target_modules": TEXTS,
    "trtllm_modules_to_hf_modules": {"type": "object", "additionalProperties": TEXT},
}
COUNTS: dict[str, Any] = {"max_loras": MAYBE_INTEGER, "max_cpu_loras": MAYBE_INTEGER}
SWAPS: dict[str, Any] = {"swap_gate_up_proj_lora_b_weight": BOOLEAN}

_EARLY = PLUGIN_CONFIG | OLDER_PLUGINS
_SECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "0.17.0": (BUILD_CONFIG | UNTIL_1_1, _EARLY, LORA_CONFIG),
    "0.20.0": (BUILD_CONFIG | UNTIL_1_1, _EARLY | NEWER_PLUGINS, LORA_CONFIG),
    "1.0.0": (BUILD_CONFIG | UNTIL_1_1, _EARLY | NEWER_PLUGINS, LORA_CONFIG | COUNTS),
    "1.1.0": (BUILD_CONFIG | UNTIL_1_1, _EARLY | NEWER_PLUGINS, LORA_CONFIG | COUNTS | SWAPS),
    "1.2.1": (BUILD_CONFIG, PLUGIN_CONFIG | NEWER_PLUGINS, LORA_CONFIG | COUNTS | SWAPS),
}
RELEASES = tuple(_SECTIONS)


def schema(version: str) -> dict[str, Any]:
    """The strict JSON schema of a release's BuildConfig: no key that its classes lack, at any depth."""
    build, plugins, lora = _SECTIONS[version]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_object(build, ("max_batch_size", "max_seq_len", "kv_cache_type", "plugin_config")),
        "$defs": {"plugin_config": _object(plugins, ("gpt_attention_plugin",)), "lora_config": _object(lora, ())},
    }


def sections(version: str) -> dict[str, set[str]]:
    """The names of each of a release's classes."""
    names = ("build_config", "plugin_config", "lora_config")
    return {name: set(keys) for name, keys in zip(names, _SECTIONS[version], strict=True)}


def _object(properties: dict[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
