"""Where TensorRT-LLM's LoRA modules are in a rank's linear layers, and which parts of the matrices a rank needs.

For a column-parallel layer a rank has its rows of B, for a row-parallel layer its columns of A; the all-reduce then
includes the adapter's output. Source: tensorrt_llm/lora_manager.py and layers/lora.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trtforge.core.errors import ForgeError
from trtforge.core.features import LoraModule
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_sizes import sizes_of
from trtforge.models.families.common import fused_qkv, qkv
from trtforge.models.part_rows import part_cuts
from trtforge.models.registry import family_of_engine
from trtforge.runtime.architecture.spec import DecoderSpec

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """A LoRA module in a linear layer: output columns [first, first + out) on this rank.

    `shape`: (outputs, inputs) of the unsplit module. `rows`: the rank's rows of B one after another, `columns`: its
    columns of A. `order`: all rows of B in TensorRT-LLM's order, which is that of Hugging Face if it is None.
    """

    module: LoraModule
    first: int
    shape: tuple[int, int]
    rows: tuple[Range, ...]
    columns: Range
    order: tuple[Range, ...] | None = None

    @property
    def out(self) -> int:
        """Number of outputs on this rank."""
        return sum(stop - start for start, stop in self.rows)

    @property
    def inputs(self) -> int:
        """Number of inputs on this rank."""
        return self.columns[1] - self.columns[0]


def adapted_parts(
    spec: DecoderSpec, config: CheckpointConfig, modules: Collection[LoraModule]
) -> Mapping[str, tuple[Part, ...]]:
    """The parts that adapters change, by the name of the linear layer within its decoder layer.

    Raises ForgeError for a module that the network does not have as one matrix.
    """
    attention = _attention(spec, config)
    known = attention | _mlp(spec)
    lacking = [module for module in modules if all(module not in parts for parts in known.values())]
    if lacking:
        raise ForgeError(
            f"engine.features.lora: the embedded engine does not support adapters of {lacking[0]} for "
            f"{config.architecture}",
            hint=f"Use adapters of {'the attention' if attention else 'other layers'}, or the tensorrt_llm backend.",
        )
    chosen = {name: tuple(part for part in parts.values() if part.module in modules) for name, parts in known.items()}
    return {name: parts for name, parts in chosen.items() if parts}


def _attention(spec: DecoderSpec, config: CheckpointConfig) -> dict[str, dict[str, Part]]:
    if spec.latent is not None or spec.linear is not None:
        return {}
    size, hidden, rank = spec.head_size, spec.hidden_size, spec.rank.tp_rank
    queries, keys = spec.num_heads * size, spec.num_kv_heads * size
    all_queries, all_keys = queries * spec.tp, config.num_key_value_heads * size
    own = (rank * queries, (rank + 1) * queries)
    first = rank * config.num_key_value_heads // spec.tp * size  # with fewer heads than ranks, several share a head
    own_keys = (first, first + keys)
    whole, fused, order = (0, hidden), _fused_rows(config, spec.tp, rank), _fused_rows(config, 1, 0)
    return {
        "attention.qkv": {
            "attn_qkv": Part("attn_qkv", 0, (all_queries + 2 * all_keys, hidden), fused, whole, order),
            "attn_q": Part("attn_q", 0, (all_queries, hidden), (own,), whole),
            "attn_k": Part("attn_k", queries, (all_keys, hidden), (own_keys,), whole),
            "attn_v": Part("attn_v", queries + keys, (all_keys, hidden), (own_keys,), whole),
        },
        "attention.dense": {"attn_dense": Part("attn_dense", 0, (hidden, all_queries), ((0, hidden),), own)},
    }


def _fused_rows(config: CheckpointConfig, tp: int, rank: int) -> tuple[Range, ...]:
    """A rank's rows of query, key and value, in this order, in the matrix in which Hugging Face's model has all three.

    If it has three matrices, or conversion does not know the model, those of [query; key; value].
    """
    sizes = sizes_of(config)
    family, row = family_of_engine(config.base_architecture), qkv(fused_qkv("", "stacked"))
    for own in family.linears if family is not None else ():
        if own.target == row.target and len({part.module for part in own.parts}) == 1:
            row = own
    cuts = (part_cuts(sizes, row, part, sizes.hidden, tp)[rank] for part in row.parts)
    return tuple((rows.start, rows.stop) for cut in cuts for rows in cut.rows)


def _mlp(spec: DecoderSpec) -> dict[str, dict[str, Part]]:
    """The MLP's parts. Hugging Face's gate_up_proj is [gate; up], TensorRT-LLM's fused `fc` of a rank [up; gate]."""
    if spec.moe is not None:
        return {}
    inner, hidden, rank = spec.intermediate_size, spec.hidden_size, spec.rank.tp_rank
    own, total, whole = (rank * inner, (rank + 1) * inner), inner * spec.tp, (0, hidden)
    first = Part("mlp_h_to_4h", 0, (total, hidden), (own,), whole)
    down = {"mlp_4h_to_h": Part("mlp_4h_to_h", 0, (hidden, total), ((0, hidden),), own)}
    match spec.network.mlp:
        case "plain":
            return {"mlp.fc": {"mlp_h_to_4h": first}, "mlp.proj": down}
        case "up_gate":
            both, order = (_shifted(own, total), own), ((total, 2 * total), (0, total))
            up_gate = Part("mlp_h_to_4h", 0, (2 * total, hidden), both, whole, order)
            return {"mlp.fc": {"mlp_h_to_4h": up_gate}, "mlp.proj": down}
        case "gated":
            gate = Part("mlp_gate", inner, (total, hidden), (own,), whole)
            return {"mlp.fc_gate": {"mlp_h_to_4h": first, "mlp_gate": gate}, "mlp.proj": down}


def _shifted(span: Range, by: int) -> Range:
    return span[0] + by, span[1] + by
