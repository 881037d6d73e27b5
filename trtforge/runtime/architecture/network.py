"""The networks of TensorRT-LLM's architectures, as data: properties that config.json implies by `architecture` only.

Sources: tensorrt_llm/models/<family>/model.py for structure and tensor names; transformers' modeling files for the
arithmetic where the two differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from trtforge.formats.checkpoint_keys import flag, integer
from trtforge.formats.trtllm import CheckpointConfig

BiasRule = Literal["never", "always", "attn_bias", "mlp_bias", "bias"]
"""Whether a linear layer has a bias: fixed, or by the flag of that name in config.json."""

NormKind = Literal["rms", "layer", "layer_without_bias"]
MlpKind = Literal["gated", "up_gate", "plain"]
"""gated: act(fc) * gate. up_gate: fc computes both, `gate` in its second half. plain: act(fc). Then proj."""

ResidualKind = Literal["sequential", "parallel", "post_norm", "output_norm"]
"""How attention and MLP join the residual stream."""
HeadNorm = Literal["never", "always", "qk_layernorm"]
"""Whether queries and keys are normalised per head: fixed, or by the flag qk_layernorm in config.json."""


@dataclass(frozen=True)
class Residual:
    """The residual connections of a layer's attention and MLP, and the names of its norms.

    sequential: h += attention(norm(h)), then h += mlp(norm(h)). parallel: both read h; without an `mlp_norm` the MLP
    reads what attention reads. post_norm: h = norm(h + attention(h)), then h = norm(h + mlp(h)). output_norm:
    h += norm(attention(h)), then h += norm(mlp(h)).
    """

    kind: ResidualKind
    mlp_norm: str | None = "post_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None
    input_norm: str | None = "input_layernorm"

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of a layer's norms."""
        names = (self.input_norm, self.mlp_norm, self.after_attention, self.after_mlp)
        return tuple(name for name in names if name is not None)


SEQUENTIAL = Residual("sequential")
PARALLEL = Residual("parallel", mlp_norm=None)
POST_NORM = Residual("post_norm")
SANDWICH = Residual(
    "sequential",
    mlp_norm="pre_feedforward_layernorm",
    after_attention="post_layernorm",
    after_mlp="post_feedforward_layernorm",
)

OUTPUT_NORM = Residual(
    "output_norm",
    mlp_norm=None,
    after_attention="post_layernorm",
    after_mlp="post_feedforward_layernorm",
    input_norm=None,
)


def _gpt_neox(config: CheckpointConfig) -> Residual:
    kind: Literal["parallel", "sequential"] = (
        "parallel" if flag(config, "use_parallel_residual", True) else "sequential"
    )
    return Residual(kind, mlp_norm="post_attention_layernorm")


def _falcon(config: CheckpointConfig) -> Residual:
    new = flag(config, "new_decoder_architecture")
    if not new and not flag(config, "parallel_attention", True):
        return SEQUENTIAL
    two_norms = new and integer(config, "num_ln_in_parallel_attn", 2) == 2
    return Residual("parallel", mlp_norm="mlp_layernorm") if two_norms else PARALLEL


def _opt(config: CheckpointConfig) -> Residual:
    return SEQUENTIAL if flag(config, "do_layer_norm_before", True) else POST_NORM


@dataclass(frozen=True)
class Network:
    """One architecture.

    exact_gelu: hidden_act "gelu" is the exact GELU, by the error function, not TensorRT-LLM's tanh approximation.
    scaled_embedding: embeddings are multiplied by sqrt(hidden_size). splits_positions: a parallel embedding splits
    the position table too. interleaved_rope: even and odd elements of a head are rotated together, independent of
    position_embedding_type. proj_bias_in_parts: the ranks' biases of mlp.proj are summed. coarse_alibi: the ALiBi
    bias is computed in bfloat16, as in transformers. absorbed_query: checkpoints with latent attention also contain the
    product of query and key expansion. expert_size: the config.json key of an expert's inner size. expert_bias: router
    and experts have biases. sinks: the softmax of attention has an additional, learned logit per head.
    zero_centred: RMS norms multiply by 1 + weight. output_gate: sigmoids of the last heads of attention.qkv, one for
    each query head, multiply the attention's output.
    """

    norm: NormKind = "rms"
    residual: Residual | Callable[[CheckpointConfig], Residual] = SEQUENTIAL
    mlp: MlpKind = "gated"
    qkv_bias: BiasRule = "never"
    dense_bias: BiasRule = "never"
    mlp_bias: BiasRule = "never"
    lm_head_bias: bool = False
    head_norm: HeadNorm = "never"
    exact_gelu: bool = False
    embedding_norm: bool = False
    scaled_embedding: bool = False
    splits_positions: bool = False
    interleaved_rope: bool = False
    proj_bias_in_parts: bool = False
    coarse_alibi: bool = False
    latent_attention: bool = False
    absorbed_query: bool = True
    expert_size: str = "intermediate_size"
    shared_expert_gate: bool = False
    expert_bias: bool = False
    sinks: bool = False
    zero_centred: bool = False
    output_gate: bool = False

    def residual_of(self, config: CheckpointConfig) -> Residual:
        """The residual connections of this model."""
        return self.residual if isinstance(self.residual, Residual) else self.residual(config)


_LLAMA = Network(qkv_bias="attn_bias", dense_bias="attn_bias", mlp_bias="mlp_bias")
_QWEN = Network(qkv_bias="attn_bias", mlp_bias="mlp_bias", expert_size="moe_intermediate_size")
_QWEN3 = replace(_QWEN, dense_bias="attn_bias", head_norm="always")
_GEMMA = replace(_LLAMA, scaled_embedding=True)
_GEMMA2 = replace(_GEMMA, residual=SANDWICH)
_GEMMA3 = replace(_GEMMA2, head_norm="always")
_GPT = Network(norm="layer", mlp="plain", qkv_bias="bias", dense_bias="bias", mlp_bias="bias", splits_positions=True)
_BIASED = Network(norm="layer", mlp="plain", qkv_bias="always", dense_bias="always", mlp_bias="always")
_LLAMA4 = Network(qkv_bias="attn_bias", dense_bias="attn_bias", expert_size="moe_intermediate_size")
_DEEPSEEK = Network(latent_attention=True, interleaved_rope=True, expert_size="moe_inter_size")

NETWORKS = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "GraniteForCausalLM": _LLAMA,
    "QWenForCausalLM": _QWEN,
    "Qwen2ForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": replace(_QWEN, shared_expert_gate=True),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": _QWEN3,
    "Qwen3NextForCausalLM": Network(
        head_norm="always",
        expert_size="moe_intermediate_size",
        shared_expert_gate=True,
        zero_centred=True,
        output_gate=True,
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Mistral3ForConditionalGeneration": _LLAMA,
    "PhiForCausalLM": replace(_BIASED, residual=PARALLEL, lm_head_bias=True, exact_gelu=True),
    "Phi3ForCausalLM": Network(mlp="up_gate"),
    "GPT2LMHeadModel": replace(_GPT, exact_gelu=True),
    "GPTBigCodeForCausalLM": replace(_GPT, exact_gelu=True),
    "Starcoder2ForCausalLM": _GPT,
    "NemotronForCausalLM": _GPT,
    "GPTNeoXForCausalLM": replace(_BIASED, residual=_gpt_neox, exact_gelu=True),
    "GPTJForCausalLM": replace(
        _BIASED,
        residual=PARALLEL,
        qkv_bias="never",
        dense_bias="never",
        lm_head_bias=True,
        proj_bias_in_parts=True,
    ),
    "FalconForCausalLM": replace(_GPT, residual=_falcon, exact_gelu=True, coarse_alibi=True, splits_positions=False),
    "BloomForCausalLM": replace(_BIASED, embedding_norm=True),
    "OPTForCausalLM": replace(_BIASED, residual=_opt),
    "CohereForCausalLM": Network(
        norm="layer_without_bias",
        residual=PARALLEL,
        qkv_bias="attn_bias",
        dense_bias="attn_bias",
        head_norm="qk_layernorm",
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": replace(_DEEPSEEK, absorbed_query=False),
    "Exaone4ForCausalLM": Network(residual=OUTPUT_NORM, head_norm="always"),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "GptOssForCausalLM": Network(
        qkv_bias="attn_bias",
        dense_bias="attn_bias",
        expert_size="moe_intermediate_size",
        expert_bias=True,
        sinks=True,
    ),
    "Glm4MoeForCausalLM": Network(qkv_bias="attn_bias", head_norm="qk_layernorm", expert_size="moe_intermediate_size"),
}
"""By `architecture` in config.json."""
