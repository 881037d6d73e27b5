"""What one rank of a decoder computes, as data derived from a checkpoint's config.json."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Rank
from trtforge.formats.trtllm import UNQUANTIZED_MODULES, CheckpointConfig
from trtforge.runtime.rotary import RotarySpec

Algorithm = Literal["none", "fp8", "int4_awq"]
EmbeddingSplit = Literal["replicated", "vocab", "hidden"]

_ALGORITHMS: dict[str | None, Algorithm] = {None: "none", "NO_QUANT": "none", "FP8": "fp8", "W4A16_AWQ": "int4_awq"}


@dataclass(frozen=True)
class Architecture:
    """What config.json leaves to the architecture's name."""

    dense_has_bias: bool


_LLAMA = Architecture(dense_has_bias=True)
_QWEN = Architecture(dense_has_bias=False)
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "QWenForCausalLM": _QWEN,
    "Qwen2ForCausalLM": _QWEN,
}


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes are this rank's own unless they say otherwise; `vocab_size` is the whole vocabulary's."""

    rank: Rank
    tp: int
    pp: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    norm_epsilon: float
    rotary: RotarySpec
    qkv_bias: bool
    dense_bias: bool
    mlp_bias: bool
    embedding: EmbeddingSplit
    tied_embeddings: bool
    algorithm: Algorithm
    group_size: int
    exclude_modules: tuple[str, ...]
    fp8_kv_cache: bool

    @property
    def first(self) -> bool:
        """Whether this rank is of the pipeline stage that embeds tokens."""
        return self.rank.pp_rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank is of the pipeline stage that gives logits."""
        return self.rank.pp_rank == self.pp - 1

    @property
    def vocab_share(self) -> int:
        """Rows of lm_head on one rank: the vocabulary is padded to a multiple of tp."""
        return -(-self.vocab_size // self.tp)

    @property
    def qkv_rows(self) -> int:
        """Rows of attention.qkv: query heads, key heads, value heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices on this rank."""
        attention = self.qkv_rows + self.num_heads * self.head_size
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    def quantized(self, module: str) -> bool:
        """Whether a linear layer (named without its rank's layer numbering) is quantised."""
        if self.algorithm == "none":
            return False
        return not any(fnmatchcase(module, pattern) for pattern in self.exclude_modules)

    @classmethod
    def of(cls, config: CheckpointConfig, index: int) -> "DecoderSpec":
        """The part of rank `index`. Raises ForgeError for what the embedded engine cannot compute."""
        architecture = _supported(config)
        parallel = config.parallel
        tp, stages = parallel.tp, parallel.pp
        quantization = config.quantization
        excluded = quantization.exclude_modules
        return cls(
            rank=parallel.ranks[index],
            tp=tp,
            pp=stages,
            num_layers=config.num_hidden_layers // stages,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads // tp,
            num_kv_heads=max(1, config.num_key_value_heads // tp),
            head_size=config.head_size,
            intermediate_size=config.intermediate_size // tp,
            vocab_size=config.vocab_size,
            norm_epsilon=config.norm_epsilon,
            rotary=RotarySpec(
                dim=config.rotary_embedding_dim or config.head_size,
                base=config.rotary_base,
                max_positions=config.max_position_embeddings or 2048,
                scaling=config.rotary_scaling,
            ),
            qkv_bias=config.attn_bias,
            dense_bias=config.attn_bias and architecture.dense_has_bias,
            mlp_bias=config.mlp_bias,
            embedding=_embedding_split(config),
            tied_embeddings=config.tie_word_embeddings,
            algorithm=_ALGORITHMS[quantization.quant_algo],
            group_size=quantization.group_size,
            exclude_modules=tuple(UNQUANTIZED_MODULES if excluded is None else excluded),
            fp8_kv_cache=quantization.kv_cache_quant_algo == "FP8",
        )


def _embedding_split(config: CheckpointConfig) -> EmbeddingSplit:
    if not config.use_parallel_embedding or config.parallel.tp == 1:
        return "replicated"
    return "vocab" if config.embedding_sharding_dim == 0 else "hidden"


def _supported(config: CheckpointConfig) -> Architecture:
    """The architecture's traits. Raises ForgeError naming the first thing that this engine does not compute."""
    algorithms = ", ".join(name for name in _ALGORITHMS if name)
    tp, pp, layers = config.parallel.tp, config.parallel.pp, config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    supported = {
        "architecture": (config.architecture, config.architecture in ARCHITECTURES, ", ".join(ARCHITECTURES)),
        "hidden_act": (config.hidden_act, config.hidden_act in ("silu", "swiglu"), "silu"),
        "position_embedding_type": (
            config.position_embedding_type,
            config.position_embedding_type in ("rope_gpt_neox", "yarn"),
            "rope_gpt_neox",
        ),
        "qk_layernorm": (config.qk_layernorm, not config.qk_layernorm, "false"),
        "quantization.quant_algo": (
            config.quantization.quant_algo,
            config.quantization.quant_algo in _ALGORITHMS,
            algorithms,
        ),
        "quantization.kv_cache_quant_algo": (
            config.quantization.kv_cache_quant_algo,
            config.quantization.kv_cache_quant_algo in (None, "FP8"),
            "FP8",
        ),
        "mapping.cp_size": (config.parallel.cp, config.parallel.cp == 1, "1"),
        "mapping.pp_size": (pp, layers % pp == 0, f"divisors of {layers} layers"),
        "mapping.tp_size": (
            tp,
            heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and config.intermediate_size % tp == 0,
            f"divisors of {heads} heads, {kv_heads} KV heads and {config.intermediate_size} inner units",
        ),
    }
    for key, (value, known, allowed) in supported.items():
        if not known:
            raise ForgeError(
                f"config.json: {key} {value} is not known to the embedded engine",
                hint=f"It computes {allowed}; use the tensorrt_llm backend for this model.",
            )
    return ARCHITECTURES[config.architecture]
