"""Parts of a decoder's specification that only some families have: experts, latent attention, linear attention."""

from dataclasses import dataclass

from trtforge.core.dtypes import FLOAT32_BYTES
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Rank
from trtforge.formats.checkpoint_keys import integer, number, numbers, text
from trtforge.formats.checkpoint_values import require_choice
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.architecture.network import Network

_RENORMALIZE, _SPARSE_MIXER, _DEVICE_LIMITED, _DEVICE_LIMITED_RENORMALIZE = 1, 2, 3, 4
"""`normalization_mode` of TensorRT-LLM's MoeConfig (tensorrt_llm/layers/moe.py); 0 is none."""


@dataclass(frozen=True)
class Clamp:
    """Clamped gating of experts: (up + 1) x gate x sigmoid(alpha x gate), with gate <= limit and |up| <= limit.

    Rows of gate and up alternate. Source: transformers/models/gpt_oss/modeling_gpt_oss.py, GptOssExperts (5.23).
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: this rank has `local` experts from `first` on, with `expert_size` inner units each.

    Weights are softmax probabilities times `scaling`. If there are several `groups`, only the experts of the
    `top_groups` best groups are candidates. sigmoid: weights are independent sigmoids instead; experts are chosen by
    sigmoid plus a bias per expert, and a group's score is the sum of its two best. shared_size: inner units of the
    shared expert on this rank, 0 if none. on_inputs: weights are sigmoids of the chosen experts' logits, and multiply
    the experts' inputs instead of their outputs. clamp: gating of the experts, if not by the network's activation.
    biased: router and experts have biases.
    """

    num_experts: int
    first: int
    local: int
    top_k: int
    expert_size: int
    renormalize: bool
    groups: int
    top_groups: int
    scaling: float
    shared_size: int
    sigmoid: bool = False
    on_inputs: bool = False
    clamp: Clamp | None = None
    biased: bool = False

    @classmethod
    def of(cls, config: CheckpointConfig, network: Network, rank: Rank) -> "MoeSpec | None":
        """The experts of a rank, None for a dense model. Raises ForgeError for an unsupported layout or router."""
        moe = getattr(config, "moe", None) or {}
        experts = int(moe.get("num_experts") or 0)
        if not experts:
            return None
        parallel = config.parallel
        moe_tp, mode = parallel.tp // parallel.ep, int(moe.get("normalization_mode") or 0)
        expert_size = integer(config, network.expert_size) or config.intermediate_size
        shared_size = int(moe.get("shared_expert_intermediate_size") or 0)
        if experts % parallel.ep or expert_size % moe_tp or shared_size % parallel.tp or mode == _SPARSE_MIXER:
            raise ForgeError(
                f"config.json: {experts} experts of {expert_size} inner units over {parallel.ep} x {moe_tp} ranks, "
                f"normalization_mode {mode}, are not supported by the embedded engine",
                hint="Convert to a layout that divides them; the sparse mixer needs the tensorrt_llm backend.",
            )
        local = experts // parallel.ep
        limit = number(config, "swiglu_limit", 0.0)
        limited = mode in (_DEVICE_LIMITED, _DEVICE_LIMITED_RENORMALIZE)
        top_k = int(moe.get("top_k") or 1)
        groups = int(moe.get("device_limited_n_group") or 1) if limited else 1
        top_groups = int(moe.get("device_limited_topk_group") or 1) if limited else 1
        sigmoid = text(config, "scoring_func") == "sigmoid"
        require_choice(experts, top_k, groups, top_groups, by_two=sigmoid)
        # Scaling cancels if softmax scores are renormalised: they are divided by their sum, which is scaled too.
        scaled = sigmoid or mode != _DEVICE_LIMITED_RENORMALIZE
        return cls(
            num_experts=experts,
            first=rank.tp_rank % parallel.ep * local,
            local=local,
            top_k=top_k,
            expert_size=expert_size // moe_tp,
            renormalize=mode in (_RENORMALIZE, _DEVICE_LIMITED_RENORMALIZE),
            groups=groups,
            top_groups=top_groups,
            scaling=float(moe.get("device_limited_routed_scaling_factor") or 1.0) if scaled else 1.0,
            shared_size=shared_size // parallel.tp,
            sigmoid=sigmoid,
            on_inputs=text(config, "scoring_func") == "sigmoid_of_inputs",
            clamp=Clamp(number(config, "swiglu_alpha", 1.0), limit) if limit else None,
            biased=network.expert_bias,
        )


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: ranks of the compressed query (0: not compressed) and cache, sizes of a head."""

    q_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int

    @property
    def cached_size(self) -> int:
        """Cached elements per token: the latent, then the rotated part of all heads' keys."""
        return self.kv_rank + self.rope_size

    @property
    def head_size(self) -> int:
        """Elements of a head's query before absorption."""
        return self.nope_size + self.rope_size

    @classmethod
    def of(cls, config: CheckpointConfig) -> "LatentSpec":
        """From config.json."""
        return cls(
            q_rank=integer(config, "q_lora_rank"),
            kv_rank=integer(config, "kv_lora_rank"),
            nope_size=integer(config, "qk_nope_head_dim"),
            rope_size=integer(config, "qk_rope_head_dim"),
            value_size=integer(config, "v_head_dim"),
        )


@dataclass(frozen=True)
class LinearSpec:
    """Linear attention (gated DeltaNet) on a rank: `key_heads`, each with a query and a key of `key_size` that
    `value_heads` / `key_heads` values of `value_size` share; `kernel` inputs of a channel are convolved."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @property
    def keys(self) -> int:
        """Elements of all keys of a token."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Convolved elements of a token: queries, keys and values."""
        return 2 * self.keys + self.values

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in a layer: a float32 matrix for each value head, and inputs to convolve."""
        return self.values * self.key_size * FLOAT32_BYTES + (self.kernel - 1) * self.channels * itemsize

    @classmethod
    def of(cls, config: CheckpointConfig) -> "LinearSpec | None":
        """From config.json; None for a model without linear attention. Raises ForgeError for a tp that splits heads."""
        heads, tp = integer(config, "linear_num_key_heads"), config.parallel.tp
        if not numbers(config, "linear_layers"):
            return None
        if not heads or heads % tp:
            raise ForgeError(
                f"config.json: {heads} key heads of linear attention cannot be split over tp {tp}",
                hint="Convert with a --tp that divides them.",
            )
        return cls(
            key_heads=heads // tp,
            value_heads=integer(config, "linear_num_value_heads") // tp,
            key_size=integer(config, "linear_key_head_dim"),
            value_size=integer(config, "linear_value_head_dim"),
            kernel=integer(config, "linear_conv_kernel_dim"),
        )
