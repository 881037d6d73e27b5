"""A tiny random float32 model of transformers for every family: what conversions and the runtime are tested with.

Every parameter is random, norms and biases too, so that no tensor can be forgotten or swapped unnoticed. Sliding
windows are shorter than the sequences that tests compute, sizes differ from one another where they can.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
)

MIXTURES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "glm4_moe",
    "llama4",
    "gpt_oss",
    "qwen3_next",
)
"""The families with experts."""
WINDOW = 16
"""Tokens of every sliding window."""

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
_GQA = _SIZES | {"num_key_value_heads": 2, "intermediate_size": 96}
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 131, "n_positions": 256}
_FALCON = {key: value for key, value in _SIZES.items() if key != "tie_word_embeddings"} | {"ffn_hidden_size": 96}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
    "long_factor": [1.1, 1.4, 2.0, 3.5, 6.0, 9.0],
    "original_max_position_embeddings": 64,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_LLAMA4 = _SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": WINDOW,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
_DEEPSEEK = _SIZES | {
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


_SPREAD = {"sinks": 3.0, "gate_up_proj_bias": 3.0, "router.bias": 0.3}
"""Of GPT-OSS: large enough that sinks and the limit of its gate matter. transformers makes two of them random."""


def _tiny(config: Callable[..., PreTrainedConfig], *, attention: str = "eager", **values: Any) -> PreTrainedModel:
    made = config(bos_token_id=1, eos_token_id=2, **values)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    model = model.float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = next((_SPREAD[ending] for ending in _SPREAD if name.endswith(ending)), None)
            if spread is not None:
                parameter.copy_(noise * spread)
            elif name.endswith("A_log"):  # made at random; so small that linear attention remembers dozens of tokens
                parameter.copy_(noise - 2)
            elif parameter.dim() == 1 or "norm" in name:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.15)
    return model


TINY: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": partial(_tiny, LlamaConfig, **_GQA),
    "llama_biased": partial(_tiny, LlamaConfig, **_GQA, attention_bias=True, mlp_bias=True),
    "llama_tied": partial(_tiny, LlamaConfig, **_GQA | {"tie_word_embeddings": True}),
    "llama_rope_llama3": partial(_tiny, LlamaConfig, **_GQA, rope_parameters=_LLAMA3),
    "llama_yarn": partial(_tiny, LlamaConfig, **_GQA, rope_parameters=_YARN),
    "mistral": partial(_tiny, MistralConfig, **_GQA, sliding_window=WINDOW),
    "mixtral": partial(_tiny, MixtralConfig, **_GQA, num_local_experts=4, num_experts_per_tok=2),
    "granite": partial(
        _tiny,
        GraniteConfig,
        **_GQA | {"tie_word_embeddings": True},
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=2.5,
    ),
    "qwen2": partial(_tiny, Qwen2Config, **_GQA),
    "qwen2_window": partial(
        _tiny, Qwen2Config, **_GQA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen2_moe": partial(
        _tiny, Qwen2MoeConfig, **_GQA, **_MOE, shared_expert_intermediate_size=48, mlp_only_layers=[1]
    ),
    "qwen3": partial(_tiny, Qwen3Config, **_GQA | {"tie_word_embeddings": True}, head_dim=24),
    "qwen3_moe": partial(
        _tiny, Qwen3MoeConfig, **_GQA, **_MOE, head_dim=24, norm_topk_prob=True, decoder_sparse_step=2
    ),
    "qwen3_next": partial(
        _tiny,
        Qwen3NextConfig,
        **_GQA,
        **_MOE | {"num_experts": 8, "num_experts_per_tok": 3},
        head_dim=24,
        partial_rotary_factor=0.25,
        shared_expert_intermediate_size=96,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=12,
        linear_value_head_dim=10,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
    "gemma": partial(_tiny, GemmaConfig, **_GQA | {"num_key_value_heads": 1, "tie_word_embeddings": True}, head_dim=24),
    "gemma2": partial(
        _tiny,
        Gemma2Config,
        **_GQA | {"tie_word_embeddings": True},
        head_dim=24,
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": partial(
        _tiny,
        Gemma3TextConfig,
        **_GQA | {"tie_word_embeddings": True},
        head_dim=24,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        query_pre_attn_scalar=20,
        rope_parameters=_GEMMA3_ROPE,
    ),
    "phi": partial(_tiny, PhiConfig, **_SIZES, intermediate_size=96, partial_rotary_factor=0.5),
    "phi3": partial(_tiny, Phi3Config, **_GQA, sliding_window=WINDOW),
    "phi3_longrope": partial(
        _tiny,
        Phi3Config,
        **_GQA | {"tie_word_embeddings": True},
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
        rope_parameters=_LONGROPE,
    ),
    "gpt2": partial(_tiny, GPT2Config, **_GPT2),
    "gpt_bigcode": partial(_tiny, GPTBigCodeConfig, **_GPT2, n_inner=96),
    "gpt_bigcode_heads": partial(_tiny, GPTBigCodeConfig, **_GPT2, n_inner=96, multi_query=False),
    "starcoder2": partial(_tiny, Starcoder2Config, **_GQA | {"tie_word_embeddings": True}, sliding_window=WINDOW),
    "nemotron": partial(_tiny, NemotronConfig, **_GQA, partial_rotary_factor=0.5),
    "gpt_neox": partial(_tiny, GPTNeoXConfig, **_SIZES, intermediate_size=96, rotary_pct=0.25),
    "gpt_neox_sequential": partial(
        _tiny, GPTNeoXConfig, **_SIZES, intermediate_size=96, rotary_pct=0.5, use_parallel_residual=False
    ),
    "gptj": partial(_tiny, GPTJConfig, **_GPT2, rotary_dim=8, n_inner=96, tie_word_embeddings=False),
    "falcon_7b": partial(_tiny, FalconConfig, **_FALCON, multi_query=True, parallel_attn=True),
    "falcon_40b": partial(_tiny, FalconConfig, **_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_11b": partial(
        _tiny, FalconConfig, **_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    # transformers' eager Falcon adds the ALiBi bias twice: once with the causal mask, once again to the scores.
    "falcon_rw": partial(
        _tiny,
        FalconConfig,
        **_FALCON,
        attention="sdpa",
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    "bloom": partial(_tiny, BloomConfig, hidden_size=64, n_layer=4, n_head=4, vocab_size=131),
    "opt": partial(_tiny, OPTConfig, **_SIZES | {"tie_word_embeddings": True, "pad_token_id": 1}, ffn_dim=96),
    "opt_post_norm": partial(
        _tiny,
        OPTConfig,
        **_SIZES | {"tie_word_embeddings": True, "pad_token_id": 1},
        ffn_dim=96,
        do_layer_norm_before=False,
    ),
    "cohere": partial(_tiny, CohereConfig, **_GQA | {"tie_word_embeddings": True}, logit_scale=0.25),
    "cohere_qk_norm": partial(
        _tiny, CohereConfig, **_GQA | {"tie_word_embeddings": True}, logit_scale=0.25, use_qk_norm=True
    ),
    "deepseek_v2": partial(
        _tiny,
        DeepseekV2Config,
        **_DEEPSEEK,
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2_lite": partial(_tiny, DeepseekV2Config, **_DEEPSEEK, q_lora_rank=None, topk_method="greedy"),
    "deepseek_v3": partial(
        _tiny,
        DeepseekV3Config,
        **_DEEPSEEK,
        q_lora_rank=20,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "exaone4": partial(_tiny, Exaone4Config, **_GQA, head_dim=24, sliding_window=WINDOW, sliding_window_pattern=3),
    "exaone4_no_window": partial(
        _tiny,
        Exaone4Config,
        **_GQA | {"tie_word_embeddings": True},
        sliding_window=None,
        layer_types=["full_attention"] * 4,
    ),
    "llama4": partial(_tiny, Llama4TextConfig, **_LLAMA4, rope_parameters=_LLAMA3 | {"high_freq_factor": 1.0}),
    "llama4_dense_between": partial(
        _tiny,
        Llama4TextConfig,
        **_LLAMA4 | {"num_experts_per_tok": 2, "attention_chunk_size": 256, "attn_temperature_tuning": False},
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attention_bias=True,
    ),
    "gpt_oss": partial(
        _tiny,
        GptOssConfig,
        **_GQA | {"intermediate_size": 32, "head_dim": 24},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters=_YARN | {"truncate": False},
    ),
    "glm4_moe": partial(
        _tiny,
        Glm4MoeConfig,
        **_GQA,
        head_dim=24,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
    ),
}
"""By family, or family and variant: makes the model, with other config values if given. The same one every time."""
