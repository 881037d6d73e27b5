"""Name and shape of every tensor of a rank file, in packing order.

Sources: tensorrt_llm/models/<family>/convert.py; tensorrt_llm/layers/moe.py for stacks of experts.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.architecture.spec_parts import LatentSpec, LinearSpec, MoeSpec

EMBEDDING = "transformer.vocab_embedding.weight"
POSITIONS = "transformer.position_embedding.weight"
EMBEDDING_NORM = "transformer.ln_embed"
FINAL_NORM = "transformer.ln_f"
LM_HEAD = "lm_head"
LINEAR_ATTENTION = "linear_attention"


@dataclass(frozen=True)
class LinearSlot:
    """A linear layer that may be quantised: (out, inputs), or (experts, out, inputs) if `experts` is not 0."""

    module: str
    out: int
    inputs: int
    bias: bool = False
    experts: int = 0


@dataclass(frozen=True)
class GatedSlot:
    """mlp.fc and mlp.gate, which are packed as mlp.fc_gate if they can share their scales."""

    fc: LinearSlot
    gate: LinearSlot

    @property
    def both(self) -> LinearSlot:
        """The two layers merged into one."""
        return LinearSlot(f"{self.fc.module}_gate", 2 * self.fc.out, self.fc.inputs, self.fc.bias)


@dataclass(frozen=True)
class TensorSlot:
    """A tensor that is never quantised; kept in float32 if `exact`."""

    name: str
    shape: tuple[int, ...]
    exact: bool = False


Slot = LinearSlot | GatedSlot | TensorSlot


def layer_name(index: int) -> str:
    """The prefix of a layer's tensors; layers are numbered within their pipeline stage."""
    return f"transformer.layers.{index}"


def router_name(index: int) -> str:
    """Name of the router's weight, which only layers with experts have."""
    return f"{layer_name(index)}.mlp.router.weight"


def rank_slots(spec: DecoderSpec, sparse: Collection[int]) -> Iterator[Slot]:
    """All slots of a rank; `sparse`: its layers that have experts."""
    for index in range(spec.num_layers):
        yield from layer_slots(spec, index, sparse)
    yield from embedding_slots(spec)
    yield from head_slots(spec)


def layer_slots(spec: DecoderSpec, index: int, sparse: Collection[int]) -> Iterator[Slot]:
    """The slots of layer `index` of a rank's pipeline stage."""
    yield from _layer(spec, layer_name(index), index in sparse, linear=spec.layers[index].linear)


def embedding_slots(spec: DecoderSpec) -> Iterator[Slot]:
    """The slots before the layers, on the first pipeline stage only."""
    hidden = spec.hidden_size
    if spec.first:
        yield TensorSlot(EMBEDDING, _table(spec, spec.vocab_size))
        if spec.position == "learned":
            whole = (spec.max_positions, hidden)
            yield TensorSlot(POSITIONS, _table(spec, spec.max_positions) if spec.network.splits_positions else whole)
        if spec.network.embedding_norm:
            yield from _norm(spec, EMBEDDING_NORM)


def head_slots(spec: DecoderSpec) -> Iterator[Slot]:
    """The slots after the layers, on the last pipeline stage only."""
    if spec.last:
        if spec.final_norm:
            yield from _norm(spec, FINAL_NORM)
        yield LinearSlot(LM_HEAD, spec.vocab_share, spec.hidden_size, spec.network.lm_head_bias)


def _table(spec: DecoderSpec, rows: int) -> tuple[int, int]:
    match spec.embedding:
        case "replicated":
            return rows, spec.hidden_size
        case "vocab":
            return -(-rows // spec.tp), spec.hidden_size
        case "hidden":
            return rows, spec.hidden_size // spec.tp


def _layer(spec: DecoderSpec, name: str, sparse: bool, *, linear: bool) -> Iterator[Slot]:
    for norm in spec.residual.norms:
        yield from _norm(spec, f"{name}.{norm}")
    if linear and spec.linear:
        yield from _linear_attention(spec, spec.linear, f"{name}.{LINEAR_ATTENTION}")
    elif spec.latent:
        yield from _latent_attention(spec, spec.latent, f"{name}.attention")
    else:
        yield from _attention(spec, f"{name}.attention")
    if spec.kv_format != "none" and not linear:
        yield TensorSlot(f"{name}.attention.kv_cache_scaling_factor", (1,), exact=True)
    if sparse and spec.moe:
        yield from _experts(spec, spec.moe, f"{name}.mlp")
    else:
        yield from _mlp(spec, f"{name}.mlp")


def _norm(spec: DecoderSpec, name: str) -> Iterator[Slot]:
    yield TensorSlot(f"{name}.weight", (spec.hidden_size,))
    if spec.network.norm == "layer":
        yield TensorSlot(f"{name}.bias", (spec.hidden_size,))


def _attention(spec: DecoderSpec, name: str) -> Iterator[Slot]:
    size = spec.head_size
    yield LinearSlot(f"{name}.qkv", spec.qkv_rows, spec.hidden_size, spec.qkv_bias)
    yield LinearSlot(f"{name}.dense", spec.hidden_size, spec.num_heads * size, spec.dense_bias)
    if spec.head_norm:
        # An RMS norm has one weight for all heads, Cohere's layer norm one per head.
        for norm, heads in (("q_layernorm", spec.num_heads), ("k_layernorm", spec.num_kv_heads)):
            yield TensorSlot(f"{name}.{norm}.weight", (size,) if spec.network.norm == "rms" else (heads, size))
    if spec.network.sinks:
        yield TensorSlot(f"{name}.sinks", (spec.num_heads,))


def _latent_attention(spec: DecoderSpec, latent: LatentSpec, name: str) -> Iterator[Slot]:
    heads, hidden = spec.num_heads, spec.hidden_size
    query_inputs = latent.q_rank or hidden
    yield LinearSlot(f"{name}.fused_a", latent.q_rank + latent.cached_size, hidden)
    if latent.q_rank:
        yield TensorSlot(f"{name}.q_a_layernorm.weight", (latent.q_rank,))
    yield TensorSlot(f"{name}.kv_a_layernorm.weight", (latent.kv_rank,))
    yield TensorSlot(f"{name}.q_b_proj", (heads * latent.head_size, query_inputs))
    yield TensorSlot(f"{name}.kv_b_proj", (heads * (latent.nope_size + latent.value_size), latent.kv_rank))
    if spec.network.absorbed_query:
        yield TensorSlot(f"{name}.fused_q_proj", (heads * latent.cached_size, query_inputs))
    yield LinearSlot(f"{name}.dense", hidden, heads * latent.value_size)


def _linear_attention(spec: DecoderSpec, linear: LinearSpec, name: str) -> Iterator[Slot]:
    hidden, heads = spec.hidden_size, linear.value_heads
    yield TensorSlot(f"{name}.in_proj_qkvz.weight", (2 * (linear.keys + linear.values), hidden))
    yield TensorSlot(f"{name}.in_proj_ba.weight", (2 * heads, hidden))
    yield TensorSlot(f"{name}.conv1d.weight", (linear.channels, linear.kernel))
    yield TensorSlot(f"{name}.A_log", (heads,))
    yield TensorSlot(f"{name}.dt_bias", (heads,))
    yield TensorSlot(f"{name}.norm.weight", (linear.value_size,))
    yield TensorSlot(f"{name}.out_proj.weight", (hidden, linear.values))


def _mlp(spec: DecoderSpec, name: str) -> Iterator[Slot]:
    hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    fc = LinearSlot(f"{name}.fc", inner, hidden, bias)
    match spec.network.mlp:
        case "gated":
            yield GatedSlot(fc, LinearSlot(f"{name}.gate", inner, hidden, bias))
        case "up_gate":
            yield LinearSlot(f"{name}.fc", 2 * inner, hidden, bias)
        case "plain":
            yield fc
    yield LinearSlot(f"{name}.proj", hidden, inner, bias)


def _experts(spec: DecoderSpec, moe: MoeSpec, name: str) -> Iterator[Slot]:
    hidden = spec.hidden_size
    yield TensorSlot(f"{name}.router.weight", (moe.num_experts, hidden), exact=True)
    if moe.biased:
        yield TensorSlot(f"{name}.router.bias", (moe.num_experts,))
    if moe.sigmoid:
        yield TensorSlot(f"{name}.e_score_correction_bias", (moe.num_experts,), exact=True)
    yield LinearSlot(f"{name}.fc", 2 * moe.expert_size, hidden, moe.biased, moe.local)
    yield LinearSlot(f"{name}.proj", hidden, moe.expert_size, moe.biased, moe.local)
    if moe.shared_size:
        yield LinearSlot(f"{name}.shared_expert.fc", 2 * moe.shared_size, hidden)
        yield LinearSlot(f"{name}.shared_expert.proj", hidden, moe.shared_size)
        if spec.network.shared_expert_gate:
            yield TensorSlot(f"{name}.shared_expert_gate.weight", (1, hidden))
