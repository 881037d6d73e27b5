"""The config.json of a small model of every family, wide enough for AWQ groups of 128 on two ranks.

Those whose checkpoints were loaded into TensorRT-LLM's own networks (`loaded.json`).
"""

from pathlib import Path
from typing import Any

from trtforge.formats.hf import HfConfig
from trtforge.plan.model import Model

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_GQA = _SIZES | {"num_key_value_heads": 4, "intermediate_size": 512}
_TIED = {"tie_word_embeddings": True}
_GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 8, "vocab_size": 512, "n_positions": 256, "torch_dtype": "bfloat16"}
_FALCON = _SIZES | {"ffn_hidden_size": 1024}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_YARN = {
    "type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LONG = {
    "type": "longrope", "short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [1.0 + i for i in range(16)]
}  # fmt: skip
_DEEPSEEK = _SIZES | {
    "num_key_value_heads": 8, "intermediate_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "rope_scaling": _YARN, "topk_method": "greedy",
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.5
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 256, "n_layer": 2, "n_head": 8, "vocab_size": 512}),
    "cohere": ("CohereForCausalLM", _GQA | _TIED),
    "cohere_qk": ("CohereForCausalLM", _GQA | _TIED | {"use_qk_norm": True}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _DEEPSEEK),
    "falcon_40b": ("FalconForCausalLM", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_7b": ("FalconForCausalLM", _FALCON | {"multi_query": True, "parallel_attn": True}),
    "falcon_rw": ("FalconForCausalLM", _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False}),
    "gemma": ("GemmaForCausalLM", _GQA | _TIED | {"num_key_value_heads": 1, "head_dim": 64}),
    "gemma2": ("Gemma2ForCausalLM", _GQA | _TIED | {"head_dim": 32, "query_pre_attn_scalar": 64}),
    "gemma3": ("Gemma3ForCausalLM", _GQA | _TIED | {"head_dim": 32, "sliding_window": 64}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT2 | {"n_inner": 1024, "multi_query": True}),
    "gpt_neox": ("GPTNeoXForCausalLM", _SIZES | {"intermediate_size": 1024, "rotary_pct": 0.25}),
    "gptj": ("GPTJForCausalLM", _GPT2 | {"rotary_dim": 16, "n_inner": 1024}),
    "granite": ("GraniteForCausalLM", _GQA | _TIED | _GRANITE),
    "llama": ("LlamaForCausalLM", _GQA),
    "llama_rope3": ("LlamaForCausalLM", _GQA | {"rope_scaling": _LLAMA3}),
    "llama_tied": ("LlamaForCausalLM", _GQA | _TIED),
    "mistral": ("MistralForCausalLM", _GQA),
    "mixtral": ("MixtralForCausalLM", _GQA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": ("NemotronForCausalLM", _GQA | {"partial_rotary_factor": 0.5, "hidden_act": "relu2"}),
    "opt": ("OPTForCausalLM", _SIZES | _TIED | {"ffn_dim": 1024, "word_embed_proj_dim": 256}),
    "phi": ("PhiForCausalLM", _SIZES | {"intermediate_size": 1024, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", _GQA),
    "phi3_long": ("Phi3ForCausalLM", _GQA | {"original_max_position_embeddings": 64, "rope_scaling": _LONG}),
    "qwen2": ("Qwen2ForCausalLM", _GQA),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _GQA | _MOE | {"shared_expert_intermediate_size": 256}),
    "qwen3": ("Qwen3ForCausalLM", _GQA | {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _GQA | _MOE | {"head_dim": 32, "norm_topk_prob": True}),
    "starcoder2": ("Starcoder2ForCausalLM", _GQA | _TIED),
}


def small(name: str, **changes: Any) -> Model:
    """One of the models, with other values in its config.json."""
    architecture, values = CONFIGS[name]
    return Model.of_config(name, HfConfig({"architectures": [architecture], **values, **changes}, Path("config.json")))
