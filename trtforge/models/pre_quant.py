"""AWQ pre-quantisation scales in Hugging Face's layout: a linear's own, or folded into the normalisation before it.

TensorRT-LLM's PyTorch backend fuses the linears that read one input and applies no pre-quantisation scale to fused
ones; a single linear has its own (`W4A16_AWQ_LinearMethod`, tensorrt_llm/_torch/modules/linear.py, 1.2). ModelOpt folds
the scale of fused linears into the normalisation (export/quant_utils.py, `fuse_prequant_layernorm`, 0.47).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trtforge.core.errors import ForgeError
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.family import Facts, Family, Linear, Split, Vector

_NORMS = {"attention.qkv": ("input_layernorm",), "mlp.fc": ("pre_feedforward_layernorm", "post_layernorm")}
"""The normalisations before these linears in TensorRT-LLM's decoder layers, nearest first."""


@dataclass(frozen=True)
class PreQuant:
    """The pre-quantisation scale of a module: tensor `target` of each rank in `parts`, with the rank's range of inputs.

    `into`: the weight and bias of the normalisation into which it is folded, by Hugging Face name; empty if not folded.
    """

    target: str
    parts: Mapping[int, range]
    into: tuple[str, ...] = ()

    @property
    def folded(self) -> bool:
        """Whether it is folded into a normalisation instead of having its own tensor."""
        return bool(self.into)


def pre_quants(
    family: Family, facts: Facts, layout: Layout, stored: Sequence[Mapping[str, StoredTensor]]
) -> dict[str, PreQuant]:
    """The scale of every quantised module, by its full Hugging Face name.

    Raises ForgeError if fused linears have different scales, or if a scale cannot be folded into a normalisation.
    """
    found: dict[str, PreQuant] = {}
    tp = layout.parallel.tp
    for stage in range(layout.parallel.pp):
        ranks = range(stage * tp, (stage + 1) * tp)
        for local, layer in enumerate(layout.parallel.layers_of(stage, facts.sizes.num_layers)):
            prefix, source = f"transformer.layers.{local}.", f"{family.layer_prefix}.{layer}."
            for rows in _fused(family, facts, layer):
                names = [f"{prefix}{row.target}.prequant_scaling_factor" for row in rows]
                if names[0] not in stored[ranks[0]]:
                    continue
                _require_equal(names, [stored[ranks[0]].get(name) for name in names])
                modules = list(dict.fromkeys(source + part.module for row in rows for part in row.parts))
                into = tuple(source + name for name in _norm(family, facts, rows[0])) if len(modules) > 1 else ()
                scale = PreQuant(names[0], dict(_parts(rows[0], ranks, stored, names[0])), into)
                found |= dict.fromkeys(modules, scale)
    return found


def _fused(family: Family, facts: Facts, layer: int) -> Iterator[tuple[Linear, ...]]:
    """Groups of rows that read the same input."""
    rows = [row for row in family.linears if facts.holds(row.when, layer)]
    for leader in rows:
        if leader.shares_input is None:
            yield (leader, *(row for row in rows if row.shares_input == leader.target))


def _parts(
    row: Linear, ranks: range, stored: Sequence[Mapping[str, StoredTensor]], name: str
) -> Iterator[tuple[int, range]]:
    """Ranks with their range of inputs: all inputs on the first rank, or a share on each if the row is row-parallel."""
    width = stored[ranks[0]][name].spec.shape[-1]
    for number, rank in enumerate(ranks if row.split is Split.ROW else ranks[:1]):
        yield rank, range(number * width, (number + 1) * width)


def _norm(family: Family, facts: Facts, row: Linear) -> tuple[str, ...]:
    """Weight and bias of the normalisation before a row.

    Raises ForgeError if there is none, or if attention and MLP share it, as it then cannot absorb either's scale.
    """
    present = {v.target.rpartition(".")[0] for v in family.layer if isinstance(v, Vector) and facts.holds(v.when)}
    nearest = {target: next((n for n in norms if n in present), None) for target, norms in _NORMS.items()}
    norm = nearest.get(row.target)
    if norm is None or None in nearest.values():
        raise ForgeError(
            f"W4A16_AWQ of {family.name}: the scale of {row.target}'s inputs cannot be folded into a normalisation",
            hint="Convert with --quant fp8 or nvfp4.",
        )
    vectors = (v for v in family.layer if isinstance(v, Vector) and facts.holds(v.when))
    return tuple(v.source for v in vectors if v.target.rpartition(".")[0] == norm)


def _require_equal(names: list[str], tensors: list[StoredTensor | None]) -> None:
    with RowReader() as reader:
        values = [
            bytes(reader.read_bytes(tensor, 0, memoryview(bytearray(tensor.spec.nbytes)))) if tensor else b""
            for tensor in tensors
        ]
    for name, value in zip(names[1:], values[1:], strict=True):
        if value != values[0]:
            raise ForgeError(
                f"{names[0]} and {name} differ: the LLM API fuses both linears, which need one pre-quantisation scale",
                hint="Convert with --shared-pre-quant-scale (a build with backend llmapi does).",
            )
