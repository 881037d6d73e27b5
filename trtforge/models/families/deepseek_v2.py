"""DeepSeek-V2: multi-head latent attention (MLA) and a mixture of experts after the first dense layers.

Source: tensorrt_llm/models/deepseek_v2/convert.py and config.py (0.17 and its DeepSeek branch). `q_lora_rank` null
(V2-Lite): queries are projected from the hidden state directly.
"""

from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.formats.rope import rope_scaling
from trtforge.models.families.common import (
    EXPERT,
    INPUT_NORM,
    LLAMA_MODEL,
    POST_NORM,
    ROTARY_TABLES,
    experts,
    gated_mlp,
    moe_fields,
    require,
    require_causal,
    router,
    shared_expert,
    with_defaults,
)
from trtforge.models.family import (
    AbsorbedQuery,
    Facts,
    Family,
    Linear,
    Part,
    PerHead,
    Row,
    Size,
    Sizes,
    Split,
    Vector,
    holding,
)

_KV: tuple[Size, ...] = ("k_nope", "v_mla")


def _query(module: str, inputs: Size, when: Any) -> tuple[Row, ...]:
    """The absorbed query of the generation phase, and the plain one of the context phase."""
    return (
        AbsorbedQuery("attention.fused_q_proj", module, "self_attn.kv_b_proj", inputs, when),
        Linear(
            "attention.q_b_proj", (Part(module, "q_b"),), inputs, Split.HEADS, quantized=False, when=when, bare=True
        ),
    )


def _compress(parts: tuple[Part, ...], when: Any) -> Linear:
    return Linear("attention.fused_a", parts, "hidden", Split.REPLICATE, quantized=False, when=when)


_KV_A = Part("self_attn.kv_a_proj_with_mqa", "kv_a")
LAYER: tuple[Row, ...] = (
    INPUT_NORM,
    _compress((Part("self_attn.q_a_proj", "q_lora"), _KV_A), "q_lora"),
    _compress((_KV_A,), "no_q_lora"),
    Vector("attention.q_a_layernorm.weight", "self_attn.q_a_layernorm.weight", "q_lora", when="q_lora"),
    Vector("attention.kv_a_layernorm.weight", "self_attn.kv_a_layernorm.weight", "kv_lora"),
    *_query("self_attn.q_b_proj", "q_lora", "q_lora"),
    *_query("self_attn.q_proj", "hidden", "no_q_lora"),
    Linear(
        "attention.kv_b_proj",
        (
            Part("self_attn.kv_b_proj", "k_nope", PerHead((), _KV)),
            Part("self_attn.kv_b_proj", "v_mla", PerHead(("k_nope",), _KV)),
        ),
        inputs="kv_lora",
        split=Split.HEADS,
        quantized=False,
        bare=True,
    ),
    Linear("attention.dense", (Part("self_attn.o_proj", "hidden"),), "v_mla", Split.ROW),
    POST_NORM,
    *gated_mlp(bias=None, when="dense_layer"),
    router("mlp.gate"),
    *experts(gate=f"{EXPERT}.gate_proj", up=f"{EXPERT}.up_proj", down=f"{EXPERT}.down_proj"),
    *shared_expert("mlp.shared_experts"),
)
_DEFAULTS = {"q_lora_rank": 1536, "n_shared_experts": 2}  # DeepseekV2Config's


def facts(config: HfConfig) -> Facts:
    """The facts of a DeepSeek-V2 config.json."""
    require(config, "hidden_act", "silu", ("silu",), "TensorRT-LLM's DeepSeek has the gated SiLU MLP only")
    require(config, "attention_bias", False, (False,), "TensorRT-LLM's MLA has no biases")
    require(config, "moe_layer_freq", 1, (1,), "TensorRT-LLM has experts in every layer after the dense ones")
    config = with_defaults(config, _DEFAULTS)
    sizes, q_lora = _sizes(config), config.count("q_lora_rank") or None
    shared = sizes.of("shared_intermediate")
    dense_layers, moe = config.count("first_k_dense_replace"), _moe(config, shared)
    return Facts(
        sizes=sizes,
        tied_embeddings=config.flag("tie_word_embeddings"),
        config={
            "hidden_act": "swiglu",
            "norm_epsilon": config.number("rms_norm_eps", 1e-6, least=0),
            "position_embedding_type": "rope_gpt_neox",
            "rotary_base": config.rope_theta,
            "rotary_scaling": _rotary_scaling(config),
            "rotary_embedding_dim": sizes.head_size,
            "attn_bias": False,
            "mlp_bias": False,
            "q_lora_rank": q_lora,
            **{key: config.integer(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
            "v_head_dim": config.integer("v_head_dim"),
            "moe": moe,
            **_flat(moe, config.count("n_shared_experts")),
            "moe_inter_size": sizes.of("moe_intermediate"),
            "topk_method": str(config.values.get("topk_method", "greedy")),
            "first_k_dense_replace": dense_layers,
            "moe_layer_freq": 1,
            "coring_func": str(config.values.get("scoring_func", "softmax")),
            "fp8_format": False,
        },
        holding=holding(q_lora=q_lora is not None, no_q_lora=q_lora is None),
        sparse_layers=frozenset(range(dense_layers, sizes.num_layers)),
    )


def _sizes(config: HfConfig) -> Sizes:
    """The sizes. The KV cache has one compressed key-value head: kv_lora_rank + qk_rope_head_dim."""
    require_causal(config)
    heads, inner = config.integer("num_attention_heads"), config.integer("moe_intermediate_size")
    lora, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    nope, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    more: dict[Size, int] = {
        "experts": config.integer("n_routed_experts"),
        "moe_intermediate": inner,
        "shared_intermediate": inner * config.count("n_shared_experts"),
        "q_lora": config.count("q_lora_rank"),
        "kv_lora": lora,
        "kv_a": lora + rope,
        "q_b": heads * (nope + rope),
        "k_nope": heads * nope,
        "q_pe": heads * rope,
        "v_mla": heads * value,
    }
    return Sizes(
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=1,
        head_size=lora + rope,
        hidden=config.integer("hidden_size"),
        intermediate=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
        more=more,
    )


def _moe(config: HfConfig, shared: int) -> dict[str, Any]:
    """The `moe` object; normalisation modes 3 and 4 are the device-limited ones."""
    method, scaling = config.values.get("topk_method", "greedy"), config.number("routed_scaling_factor", 1.0)
    top_k = config.integer("num_experts_per_tok")
    renormalize = int(top_k > 1 and config.flag("norm_topk_prob"))
    experts = config.integer("n_routed_experts")
    if method == "group_limited_greedy":
        groups, best = config.integer("n_group"), config.integer("topk_group")
        limits = {"n_group": groups, "topk_group": best, "scaling": scaling}
        return moe_fields(experts, top_k, 3 + renormalize, shared, **limits)
    if method != "greedy" or scaling != 1.0:
        raise ForgeError(
            f"{config.path}: topk_method {method} with routed_scaling_factor {scaling} cannot be converted",
            hint="TensorRT-LLM's engines support group_limited_greedy, or greedy with routed_scaling_factor 1.",
        )
    return moe_fields(experts, top_k, renormalize, shared)


def _flat(moe: dict[str, Any], shared_experts: int) -> dict[str, Any]:
    """The fields of `moe` at the top level for 0.17 and 0.18; later releases read the object."""
    names = {
        "moe_num_experts": "num_experts",
        "moe_top_k": "top_k",
        "moe_renorm_mode": "normalization_mode",
        "moe_n_group": "device_limited_n_group",
        "moe_topk_group": "device_limited_topk_group",
        "moe_routed_scaling_factor": "device_limited_routed_scaling_factor",
    }
    return {name: moe[key] for name, key in names.items()} | {"moe_num_shared_experts": shared_experts}


def _rotary_scaling(config: HfConfig) -> dict[str, Any] | None:
    scaling = rope_scaling(config)
    if scaling is None:
        return None
    scaling = {"beta_fast": 32, "beta_slow": 1} | scaling  # transformers' defaults (modeling_rope_utils.py)
    keys = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "original_max_position_embeddings")
    missing = [key for key in keys if key not in scaling]
    if missing or scaling.get("rope_type", scaling.get("type")) != "yarn":
        raise ForgeError(
            f"{config.path}: rope_scaling is not complete yarn scaling",
            hint=f"DeepSeek-V2 needs type yarn with {', '.join(keys)}.",
        )
    given = HfConfig(scaling, config.path)
    require(given, "attention_factor", None, (None,), "TensorRT-LLM's DeepSeek has the factor of mscale only")
    require(given, "truncate", True, (True,), "TensorRT-LLM's DeepSeek rounds the range of scaled dimensions")
    return {key: scaling[key] for key in keys} | {"type": "yarn"}


FAMILY = Family(
    name="deepseek_v2",
    architectures={"DeepseekV2ForCausalLM": "DeepseekV2ForCausalLM"},
    layer_prefix="model.layers",
    layer=LAYER,
    model=LLAMA_MODEL,
    facts=facts,
    dropped=ROTARY_TABLES,
)
