"""Shared by many families: the rows of a Llama layer, and facts read from common config.json keys."""

from collections.abc import Mapping
from typing import Any, Literal

from trtforge.core.errors import ForgeError
from trtforge.formats.checkpoint_values import require_choice
from trtforge.formats.hf import ITS_OWN_CONFIG, HfConfig
from trtforge.formats.rope import require_factors, rope_scaling
from trtforge.models.family import (
    Embedding,
    Experts,
    Fact,
    Grouped,
    Linear,
    Part,
    PipelineStage,
    Row,
    Size,
    Sizes,
    Split,
    Stacked,
    Vector,
)

SELF_ATTENTION = (
    Part("self_attn.q_proj", "q"),
    Part("self_attn.k_proj", "kv"),
    Part("self_attn.v_proj", "kv"),
)


def fused_qkv(module: str, rows: Literal["stacked", "grouped"]) -> tuple[Part, Part, Part]:
    """Query, key and value parts of one module."""
    if rows == "grouped":
        return Part(module, "q", Grouped("q")), Part(module, "kv", Grouped("k")), Part(module, "kv", Grouped("v"))
    of: tuple[Size, ...] = ("q", "kv", "kv")
    return (
        Part(module, "q", Stacked((), of)),
        Part(module, "kv", Stacked(("q",), of)),
        Part(module, "kv", Stacked(("q", "kv"), of)),
    )


def qkv(parts: tuple[Part, ...] = SELF_ATTENTION, bias: Fact | None = "qkv_bias", *, conv1d: bool = False) -> Linear:
    """The fused query, key and value projection."""
    return Linear("attention.qkv", parts, inputs="hidden", split=Split.HEADS, bias=bias, conv1d=conv1d)


def dense(module: str = "self_attn.o_proj", bias: Fact | None = "dense_bias", *, conv1d: bool = False) -> Linear:
    """The attention output projection."""
    return Linear("attention.dense", (Part(module, "hidden"),), "q", Split.ROW, bias, conv1d=conv1d)


def gated_mlp(bias: Fact | None = "mlp_bias", when: Fact | None = None) -> tuple[Linear, Linear, Linear]:
    """TensorRT-LLM's `fc` is HF's gate_proj, its `gate` is HF's up_proj."""
    return (
        Linear("mlp.fc", (Part("mlp.gate_proj", "intermediate"),), "hidden", Split.COLUMN, bias, when=when),
        Linear(
            "mlp.gate",
            (Part("mlp.up_proj", "intermediate"),),
            inputs="hidden",
            split=Split.COLUMN,
            bias=bias,
            shares_scale="mlp.fc",
            shares_input="mlp.fc",
            when=when,
        ),
        Linear("mlp.proj", (Part("mlp.down_proj", "hidden"),), "intermediate", Split.ROW, bias, when=when),
    )


def plain_mlp(up: str, down: str, *, conv1d: bool = False) -> tuple[Linear, Linear]:
    """Two matrices with an activation between them."""
    return (
        Linear("mlp.fc", (Part(up, "intermediate"),), "hidden", Split.COLUMN, "mlp_bias", conv1d=conv1d),
        Linear("mlp.proj", (Part(down, "hidden"),), "intermediate", Split.ROW, "mlp_bias", conv1d=conv1d),
    )


def router(module: str) -> Linear:
    """The router: float32, replicated on every rank (tensorrt_llm/layers/moe.py)."""
    part = Part(module, "experts")
    return Linear(
        "mlp.router", (part,), "hidden", Split.REPLICATE, quantized=False, when="sparse_layer", dtype="float32"
    )


ROUTER_BIAS = Vector(
    "mlp.e_score_correction_bias",
    "mlp.gate.e_score_correction_bias",
    "experts",
    when="sparse_layer",
    dtype="float32",
)
"""The bias added to the experts' sigmoid scores for choosing experts."""


def experts(gate: str, up: str, down: str) -> tuple[Experts, Experts]:
    """[up; gate] fused: the activation applies to the second half (tensorrt_llm/models/llama/convert.py)."""
    inner: Size = "moe_intermediate"
    return (
        Experts("mlp.fc", (Part(up, inner), Part(gate, inner)), "hidden", Split.COLUMN),
        Experts("mlp.proj", (Part(down, "hidden"),), inner, Split.ROW),
    )


def shared_expert(prefix: str) -> tuple[Linear, Linear]:
    """The shared expert: up and gate fused, as in `experts`."""
    inner: Size = "shared_intermediate"
    parts = (Part(f"{prefix}.up_proj", inner), Part(f"{prefix}.gate_proj", inner))
    return (
        Linear("mlp.shared_expert.fc", parts, "hidden", Split.COLUMN, when="shared_layer"),
        Linear(
            "mlp.shared_expert.proj",
            (Part(f"{prefix}.down_proj", "hidden"),),
            inner,
            Split.ROW,
            when="shared_layer",
        ),
    )


QK_NORM = (
    Vector("attention.q_layernorm.weight", "self_attn.q_norm.weight", "head", when="qk_norm"),
    Vector("attention.k_layernorm.weight", "self_attn.k_norm.weight", "head", when="qk_norm"),
)
INPUT_NORM = Vector("input_layernorm.weight", "input_layernorm.weight", "hidden")
POST_NORM = Vector("post_layernorm.weight", "post_attention_layernorm.weight", "hidden")

LLAMA_LAYER: tuple[Row, ...] = (INPUT_NORM, qkv(), dense(), POST_NORM, *gated_mlp())


def embeddings(table: str, head: str) -> tuple[Embedding, Embedding]:
    """The embedding table of the first stage and the LM head of the last; a tied model has no tensor for the head."""
    return (
        Embedding("transformer.vocab_embedding.weight", table, Split.EMBEDDING, PipelineStage.FIRST),
        Embedding("lm_head.weight", head, Split.VOCAB, PipelineStage.LAST, tied=table),
    )


EMBED, HEAD = embeddings("model.embed_tokens.weight", "lm_head.weight")
FINAL_NORM = Vector("transformer.ln_f.weight", "model.norm.weight", "hidden", PipelineStage.LAST)
LLAMA_MODEL: tuple[Row, ...] = (EMBED, FINAL_NORM, HEAD)
EXPERT = "mlp.experts.{}"
"""Name of one expert below its layer, as most families write it."""
ROTARY_TABLES = ("rotary_emb.inv_freq",)
"""Frequencies, of each layer in older checkpoints or of the model; config.json determines them."""


def require_causal(config: HfConfig) -> None:
    """Raises ForgeError for an embedding model, whose tokens attend to later tokens
    (Alibaba-NLP/gte-Qwen2-7B-instruct)."""
    require(config, "is_causal", True, (True,), "TensorRT-LLM's decoders attend to earlier tokens only")


def decoder_sizes(config: HfConfig) -> Sizes:
    """Sizes from the config.json keys that most families use. Raises ForgeError as `require_causal` does."""
    require_causal(config)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    return Sizes(
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_size=config.integer("head_dim", hidden // heads),
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings", 2048),
    )


def gpt2_sizes(config: HfConfig, kv_heads: int | None = None) -> Sizes:
    """Sizes from GPT-2's config.json keys. Raises ForgeError as `require_causal` does."""
    require_causal(config)
    heads, hidden = config.integer("n_head"), config.integer("n_embd")
    return Sizes(
        num_layers=config.integer("n_layer"),
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_size=hidden // heads,
        hidden=hidden,
        intermediate=config.integer("n_inner", 4 * hidden),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("n_positions"),
    )


def rotary(
    config: HfConfig,
    sizes: Sizes,
    fraction: float = 1.0,
    style: str = "rope_gpt_neox",
    also: tuple[str, ...] = (),
    *,
    abrupt: bool = False,
) -> dict[str, Any]:
    """The config fields of a rotary embedding over the first `fraction` of a head; the rest as in `rope_scaling`.

    Raises ForgeError as `rope_scaling`, `require_factors` and `require_rotated` do.
    """
    dim, scaling = int(sizes.head_size * fraction), rope_scaling(config, also=also, abrupt=abrupt)
    require_rotated(config, dim, sizes)
    require_factors(config, scaling or {}, dim)
    return {
        "position_embedding_type": style,
        "rotary_base": config.rope_theta,
        "rotary_scaling": scaling,
        "rotary_embedding_dim": dim,
    }


def require_rotated(config: HfConfig, dim: int, sizes: Sizes) -> None:
    """Raises ForgeError if `dim` elements of a head cannot be rotated."""
    if not 2 <= dim <= sizes.head_size:
        raise ForgeError(
            f"{config.path}: {dim} elements of a head of {sizes.head_size} cannot be rotated", hint=ITS_OWN_CONFIG
        )


def sliding_window(config: HfConfig, layers: tuple[int, ...] | None = None) -> dict[str, Any]:
    """The sliding window and the layers that use it (`layers` None: all). Raises ForgeError for a wrong window.

    TensorRT-LLM's converters leave both out; its executor gets them at run time.
    """
    window = None if layers == () else config.count("sliding_window") or None
    listed = None if layers is None or window is None else list(layers)
    return {"sliding_window": window, "sliding_window_layers": listed}


def sliding_layers(config: HfConfig) -> tuple[int, ...] | None:
    """The layers with a sliding window according to `layer_types`; None if it is absent.

    Raises ForgeError as `layer_types` does.
    """
    kinds = layer_types(config, ("full_attention", "sliding_attention"))
    return None if not kinds else tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def layer_types(config: HfConfig, known: tuple[str, ...], hint: str = ITS_OWN_CONFIG) -> list[str]:
    """The `layer_types`, empty if absent. Raises ForgeError unless there is one of the `known` types for each layer."""
    kinds, layers = config.items("layer_types"), config.integer("num_hidden_layers")
    if kinds and (len(kinds) != layers or any(kind not in known for kind in kinds)):
        message = f"{config.path}: layer_types is not {' or '.join(known)} for each of {layers} layers"
        raise ForgeError(message, hint=hint)
    return kinds


def moe_fields(experts: int, top_k: int, normalization: int, shared: int = 0, **limits: float) -> dict[str, Any]:
    """The `moe` object: the keys that 0.17 to 1.2 all accept. Normalisation modes: tensorrt_llm/layers/moe.py.

    Raises ForgeError if a token cannot get that many experts.
    """
    if experts:
        require_choice(experts, top_k, int(limits.get("n_group", 1)), int(limits.get("topk_group", 1)))
    return {
        "num_experts": experts,
        "shared_expert_intermediate_size": shared,
        "top_k": top_k,
        "normalization_mode": normalization,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": limits.get("n_group", 0),
        "device_limited_topk_group": limits.get("topk_group", 0),
        "device_limited_routed_scaling_factor": limits.get("scaling", 1.0),
    }


def activation(config: HfConfig, key: str) -> str:
    """The activation that config.json names, by TensorRT-LLM's name (`ACT2FN` in tensorrt_llm/functional.py).

    gelu_new if it names none.
    """
    name = str(config.values.get(key) or "gelu_new")
    return {"swish": "silu", "relu2": "squared-relu", "gelu_python": "gelu"}.get(name, name)


def with_defaults(config: HfConfig, defaults: Mapping[str, Any]) -> HfConfig:
    """config.json with the defaults of transformers' configuration class for absent keys."""
    return HfConfig({**defaults, **config.values}, config.path)


def require(config: HfConfig, key: str, default: object, allowed: tuple[object, ...], why: str) -> None:
    """Raises ForgeError if a key of config.json has a value that TensorRT-LLM's network does not support."""
    value = config.values.get(key)
    value = default if value is None else value
    if value not in allowed:
        supported = " or ".join(map(str, allowed))
        raise ForgeError(f"{config.path}: {key} {value} cannot be converted", hint=f"{why}. Supported: {supported}.")
