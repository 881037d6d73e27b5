"""The specification of one rank's part of a decoder, derived from a checkpoint's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from trtforge.core.parallel import Rank
from trtforge.core.recipe import KvCacheFormat, QuantFormat
from trtforge.formats.checkpoint_keys import flag, number
from trtforge.formats.trtllm import UNQUANTIZED_MODULES, CheckpointConfig
from trtforge.models.formats import algorithm_of
from trtforge.runtime.architecture.network import BiasRule, Network, Residual
from trtforge.runtime.architecture.positions import POSITIONS, LayerSpec, Position, Reach, layer_spec, rotaries
from trtforge.runtime.architecture.rotary import RotarySpec, yarn_mscale
from trtforge.runtime.architecture.spec_parts import LatentSpec, LinearSpec, MoeSpec
from trtforge.runtime.architecture.supported import ALGORITHMS, KV_FORMATS, supported_network

EmbeddingSplit = Literal["replicated", "vocab", "hidden"]

_WEIGHT_ONLY_LAYERS = ("qkv", "dense", "fc", "gate", "proj")
"""Layers quantised in a weight-only checkpoint (TensorRT-LLM models/convert_utils.py `weight_only_quantize_dict`)."""
_LATENT = ".attention.fused_a"
"""The layer that computes latent vectors, which conversion never quantises."""


@dataclass(frozen=True)
class DecoderSpec:
    """One rank's part of a decoder. Sizes are this rank's; `vocab_size` is the whole vocabulary's."""

    network: Network
    residual: Residual
    rank: Rank
    tp: int
    pp: int
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    hidden_act: str
    norm_epsilon: float
    position: Position
    max_positions: int
    rotaries: tuple[RotarySpec, ...]
    moe: MoeSpec | None
    latent: LatentSpec | None
    linear: LinearSpec | None
    qkv_bias: bool
    dense_bias: bool
    mlp_bias: bool
    head_norm: bool
    softmax_scale: float
    softmax_cap: float | None
    logit_cap: float | None
    logit_scale: float
    embedding_scale: float
    residual_scale: float
    embedding: EmbeddingSplit
    tied_embeddings: bool
    algorithm: QuantFormat
    group_size: int
    exclude_modules: tuple[str, ...]
    layer_formats: Mapping[str, QuantFormat] | None
    """With mixed precision, the formats of the quantised linear layers by name; otherwise None."""
    kv_format: KvCacheFormat

    @property
    def num_layers(self) -> int:
        """Layers of this pipeline stage."""
        return len(self.layers)

    @property
    def first(self) -> bool:
        """Whether this rank is in the first pipeline stage, which embeds tokens."""
        return self.rank.pp_rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank is in the last pipeline stage, which computes logits."""
        return self.rank.pp_rank == self.pp - 1

    @property
    def final_norm(self) -> bool:
        """Whether a norm precedes the logits; post-norm layers already end with one."""
        return self.residual.kind != "post_norm"

    @property
    def vocab_share(self) -> int:
        """Rows of lm_head on one rank: the vocabulary is padded to a multiple of tp."""
        return -(-self.vocab_size // self.tp)

    @property
    def qkv_rows(self) -> int:
        """Rows of attention.qkv: query heads, key heads, value heads, and gates of the output if there are any."""
        gates = self.num_heads if self.network.output_gate else 0
        return (self.num_heads + 2 * self.num_kv_heads + gates) * self.head_size

    @property
    def cached(self) -> tuple[int, int]:
        """Number of cached vectors per token, and their size. A latent vector is both key and value."""
        return (1, self.head_size) if self.latent else (2 * self.num_kv_heads, self.head_size)

    @property
    def cached_layers(self) -> int:
        """Number of this stage's layers with a KV cache; linear attention layers have states instead."""
        return sum(not layer.linear for layer in self.layers)

    @cached_property
    def reaches(self) -> tuple[Reach, ...]:
        """The distinct reaches of the layers."""
        return tuple(dict.fromkeys(layer.reach for layer in self.layers))

    def within(self, longest: int) -> "DecoderSpec":
        """The same for sequences of at most `longest` tokens: chunk sizes of at least `longest` are removed."""
        layers = (
            replace(layer, chunk=None) if layer.chunk is not None and layer.chunk >= longest else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def layer_parameters(self) -> int:
        """Approximate number of one layer's weights on this rank that a token is multiplied with."""
        inner = self.moe.expert_size * self.moe.top_k + self.moe.shared_size if self.moe else self.intermediate_size
        return self.hidden_size * (self.qkv_rows + self.num_heads * self.head_size + 3 * inner)

    def format_of(self, module: str) -> QuantFormat:
        """The format of a linear layer, by its name in the rank file."""
        if self.layer_formats is not None:
            return self.layer_formats.get(module, "none")
        return self.algorithm if self.quantized(module) else "none"

    def quantized(self, module: str) -> bool:
        """Whether a linear layer, by its name in the rank file, is quantised."""
        if self.layer_formats is not None:
            return module in self.layer_formats
        if self.algorithm == "none":
            return False
        if module.endswith(_LATENT):
            return False
        if self.algorithm in ("int8_wo", "int4_wo") and module.rpartition(".")[2] not in _WEIGHT_ONLY_LAYERS:
            return False
        return not any(fnmatchcase(module, pattern) for pattern in self.exclude_modules)

    @classmethod
    def of(cls, config: CheckpointConfig, index: int) -> "DecoderSpec":
        """The part of rank `index`. Raises ForgeError for a model that the embedded engine does not support."""
        network = supported_network(config)
        parallel = config.parallel
        rank, tp = parallel.ranks[index], parallel.tp
        quantization = config.quantization
        excluded = quantization.exclude_modules
        latent = LatentSpec.of(config) if network.latent_attention else None
        return cls(
            network=network,
            residual=network.residual_of(config),
            rank=rank,
            tp=tp,
            pp=parallel.pp,
            layers=tuple(
                layer_spec(config, layer) for layer in parallel.layers_of(rank.pp_rank, config.num_hidden_layers)
            ),
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads // tp,
            num_kv_heads=max(1, config.num_key_value_heads // tp),
            head_size=latent.cached_size if latent else config.head_size,
            intermediate_size=config.intermediate_size // tp,
            vocab_size=config.vocab_size,
            hidden_act=config.hidden_act,
            norm_epsilon=config.norm_epsilon,
            position=POSITIONS[config.position_embedding_type],
            max_positions=config.max_position_embeddings or 2048,
            rotaries=rotaries(config, network, latent.rope_size if latent else None),
            moe=MoeSpec.of(config, network, rank),
            latent=latent,
            linear=LinearSpec.of(config),
            qkv_bias=_has_bias(network.qkv_bias, config),
            dense_bias=_has_bias(network.dense_bias, config),
            mlp_bias=_has_bias(network.mlp_bias, config),
            head_norm=network.head_norm == "always" or (network.head_norm != "never" and config.qk_layernorm),
            softmax_scale=_softmax_scale(config, latent),
            softmax_cap=number(config, "attn_logit_softcapping", 0.0) or None,
            logit_cap=number(config, "final_logit_softcapping", 0.0) or None,
            logit_scale=number(config, "output_multiplier_scale", 1.0),
            embedding_scale=(
                config.hidden_size**0.5 if network.scaled_embedding else number(config, "embedding_multiplier", 1.0)
            ),
            residual_scale=number(config, "residual_multiplier", 1.0),
            embedding=_embedding_split(config),
            tied_embeddings=config.tie_word_embeddings,
            algorithm=ALGORITHMS[algorithm_of(quantization)],
            group_size=quantization.group_size,
            exclude_modules=tuple(UNQUANTIZED_MODULES if excluded is None else excluded),
            layer_formats=None
            if quantization.quantized_layers is None
            else {name: ALGORITHMS[layer.quant_algo] for name, layer in quantization.quantized_layers.items()},
            kv_format=KV_FORMATS[quantization.kv_cache_quant_algo],
        )


def _has_bias(rule: BiasRule, config: CheckpointConfig) -> bool:
    return rule == "always" or (rule != "never" and flag(config, rule))


def _embedding_split(config: CheckpointConfig) -> EmbeddingSplit:
    if not config.use_parallel_embedding or config.parallel.tp == 1:
        return "replicated"
    return "vocab" if config.embedding_sharding_dim == 0 else "hidden"


def _softmax_scale(config: CheckpointConfig, latent: LatentSpec | None) -> float:
    """Scaling factor of attention scores before the softmax."""
    if latent:
        # With mscale_all_dim, YaRN's attention factor is applied here, squared (transformers deepseek_v2).
        scaling = config.rotary_scaling or {}
        factor = yarn_mscale(float(scaling.get("factor") or 1.0), float(scaling.get("mscale_all_dim") or 0.0))
        return float(latent.head_size**-0.5 * factor**2)
    size = number(config, "query_pre_attn_scalar", config.head_size)
    relative = number(config, "attention_multiplier", 1.0) / number(config, "q_scaling", 1.0)
    return float(size**-0.5 * relative)
