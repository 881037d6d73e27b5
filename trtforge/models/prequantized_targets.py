"""Targets from an already quantised source: its packed tensors cut for every rank, and the values they must hold.

Layouts: TensorRT-LLM quantization/layers.py, as ModelOpt's `export_tensorrt_llm_checkpoint` writes them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trtforge.core.dtypes import Dtype, dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.formats.quantized_source import KV_SCALES, QuantizedSource
from trtforge.formats.shards import TensorSpec
from trtforge.models.content import (
    Cast,
    Content,
    Piece,
    Repacked,
    Rescaled,
    StoredPreQuant,
    StoredScalar,
    StoredScalarRows,
    Target,
)
from trtforge.models.family import AbsorbedQuery, Experts, Facts, Family
from trtforge.models.split import Cut

FLOATS = ("float32", "float16", "bfloat16")
_CODES_PER_WORD = 8

Holds = Literal["anything", "a_scale", "zero_points", "groups_in_order", "zeros"]


@dataclass(frozen=True)
class Expected:
    """A tensor of a quantised source: shape (dimensions of 1 are ignored), dtypes, and the values it must hold.

    `zero_points`: int32 words whose nibbles are all `code`, the symmetric zero point; `groups_in_order`: element i is
    i // `code`.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    holds: Holds = "anything"
    code: int = 0
    optional: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor's shape matches."""
        return [n for n in shape if n != 1] == [n for n in self.shape if n != 1]


@dataclass(frozen=True)
class StoredSources:
    """The tensors that a plan reads from a quantised source; those of one group in `alike` must hold equal values."""

    tensors: Mapping[str, Expected] = field(default_factory=dict)
    alike: tuple[tuple[str, ...], ...] = ()


class QuantizedRows:
    """Makes the targets of a quantised source's linear layers, and collects the source tensors that they need."""

    def __init__(self, source: QuantizedSource, dtype: Dtype) -> None:
        self.source = source
        self._dtype = dtype
        self._tensors: dict[str, Expected] = {}
        self._alike: list[tuple[str, ...]] = []

    @property
    def sources(self) -> StoredSources:
        """The source tensors that all targets so far need."""
        return StoredSources(self._tensors, tuple(self._alike))

    def takes(self, modules: tuple[str, ...]) -> bool:
        """Whether these modules, fused in TensorRT-LLM, are quantised. Raises ForgeError if only some are."""
        found = [self.source.of(module) for module in modules]
        if any(found) and not all(found):
            quantized = [each is not None for each in found]
            raise ForgeError(
                f"{modules[quantized.index(True)]} is quantised and {modules[quantized.index(False)]} is not: "
                "TensorRT-LLM has one matrix for both",
                hint="Quantise both or neither, or convert the original checkpoint.",
            )
        self._require_one_format(modules)
        return all(found)

    def _require_one_format(self, modules: tuple[str, ...]) -> None:
        """Raises ForgeError if quantised modules that TensorRT-LLM joins have different formats."""
        found = {module: each for module in modules if (each := self.source.of(module)) is not None}
        if any(each is not found[modules[0]] for each in found.values()):
            raise ForgeError(
                f"{', '.join(f'{module} is {each.format}' for module, each in found.items())}: TensorRT-LLM has one "
                "format for them",
                hint="Quantise them alike, or convert the original checkpoint.",
            )

    def linear(
        self, name: str, weights: tuple[Piece, ...], shared: tuple[str, ...], stage: int, *, biased: bool
    ) -> Iterator[Target]:
        """The tensors of a linear layer, except its bias.

        `weights`: the pieces of the matrices as an unquantised source would hold them; `shared`: the modules that
        share FP8 scales with this layer, its own included.
        """
        self._require_one_format(shared)
        parts = tuple(self._part(piece) for piece in weights)
        packing = parts[0].source.packing
        if not biased and packing == "gptq":
            for part in parts:  # AutoGPTQ writes a bias for every layer, zeros if the model has none
                self._expect(f"{part.module}.bias", (part.out,), FLOATS, holds="zeros", optional=True)
        match packing:
            case "awq" | "gptq" | "pack_quantized" | "modelopt_int4" | "modelopt_w4a8":
                contents = self._int4(parts)
            case "int8_rows":
                contents = self._int8(parts)
            case "fp8":
                contents = self._fp8(parts, shared)
            case "fp8_rows" | "fp8_one_scale":
                contents = self._fp8_rows(parts)
            case "nvfp4":
                contents = self._nvfp4(parts)
        for suffix, dtype, shape, content in contents:
            yield Target(TensorSpec(f"{name}.{suffix}", dtype, shape), stage, content)

    def kv_scale(self, attention: str) -> StoredScalar:
        """A layer's FP8 KV cache scale, at least 1 as in ModelOpt's export/postprocess.py."""
        names = tuple(f"{attention}.{name}" for name in KV_SCALES)
        for name in names:
            self._expect(name, (1,), FLOATS, holds="a_scale", optional=True)
        return StoredScalar(names, least=1.0)

    def _int4(self, parts: "tuple[_Part, ...]") -> "Iterator[_Tensor]":
        out, inputs = _shape(parts)
        source, group = parts[0].source, parts[0].source.group_size
        for part in parts:
            for cut in part.weight.cuts:
                self._packed(part, cut, 2, group)
        yield "weight", dtype_named("int8"), (out // 2, inputs), self._codes(parts)
        scales = tuple(self._int4_scales(part) for part in parts)
        yield "weights_scaling_factor", FLOAT32, (out, inputs // group), _cast(scales)
        if source.packing == "modelopt_w4a8":
            yield "weights_scaling_factor_2", FLOAT32, (1,), self._largest(parts, "weight_scale_2")
            yield "activation_scaling_factor", FLOAT32, (1,), self._largest(parts, source.input_scale)
        yield self._pre_quant(parts)

    def _int8(self, parts: "tuple[_Part, ...]") -> "Iterator[_Tensor]":
        """SmoothQuant, or INT8 without it: then its scales of inputs are ones."""
        weights = tuple(self._piece(part, "weight", ("int8",)) for part in parts)
        out, inputs = _shape(parts)
        yield "weight", dtype_named("int8"), (out, inputs), Repacked(weights)
        scales = _cast(tuple(self._column(part, part.source.weight_scale, FLOATS) for part in parts))
        yield "weights_scaling_factor", FLOAT32, (out,), scales
        yield "activation_scaling_factor", FLOAT32, (1,), self._largest(parts, parts[0].source.input_scale)
        yield self._pre_quant(parts)

    def _pre_quant(self, parts: "tuple[_Part, ...]") -> "_Tensor":
        """The scale of the inputs, which the parts must share; ones where the source has none."""
        names: tuple[str, ...] = ()
        if parts[0].source.packing in ("modelopt_int4", "modelopt_w4a8", "int8_rows"):
            names = tuple(dict.fromkeys(f"{part.module}.pre_quant_scale" for part in parts))
            for name in names:
                self._expect(name, (parts[0].inputs,), FLOATS, optional=True)
            self._alike.append(names)
        cuts = parts[0].weight.cuts
        return "prequant_scaling_factor", self._dtype, (len(cuts[0].cols),), StoredPreQuant(names, cuts)

    def _largest(self, parts: "tuple[_Part, ...]", suffix: str) -> StoredScalar:
        """The largest of the parts' scalars, which has room for the numbers of each."""
        return StoredScalar(tuple(dict.fromkeys(self._scalar(part.module, suffix) for part in parts)))

    def _codes(self, parts: "tuple[_Part, ...]") -> Repacked:
        words, byte = ("int32",), ("uint8", "int8")
        match parts[0].source.packing:
            case "awq":
                pieces = [self._piece(p, "qweight", words, rows=_CODES_PER_WORD, transposed=True) for p in parts]
                return Repacked(tuple(pieces), "awq")
            case "gptq":
                pieces = [self._piece(p, "qweight", words, columns=_CODES_PER_WORD, transposed=True) for p in parts]
                return Repacked(tuple(pieces), "gptq")
            case "pack_quantized":
                for part in parts:
                    self._expect(f"{part.module}.weight_shape", (2,), ("int64", "int32"))
                pieces = [self._piece(p, "weight_packed", words, columns=_CODES_PER_WORD) for p in parts]
                return Repacked(tuple(pieces), "gptq")
            case _:
                return Repacked(tuple(self._piece(p, "weight", byte, rows=2) for p in parts))

    def _int4_scales(self, part: "_Part") -> Piece:
        source, group = part.source, part.source.group_size
        match source.packing:
            case "awq" | "gptq":
                code = source.stored_zero
                zeros = (part.inputs // group, part.out // _CODES_PER_WORD)
                self._expect(f"{part.module}.qzeros", zeros, ("int32",), holds="zero_points", code=code)
                if source.packing == "gptq":
                    indices = ("int32", "int64")
                    self._expect(
                        f"{part.module}.g_idx", (part.inputs,), indices, holds="groups_in_order", code=group,
                        optional=True,
                    )  # fmt: skip
                return self._piece(part, "scales", FLOATS, columns=group, transposed=True)
            case _:
                return self._piece(part, "weight_scale", FLOATS, columns=group)

    def _fp8(self, parts: "tuple[_Part, ...]", shared: tuple[str, ...]) -> "Iterator[_Tensor]":
        weights = tuple(self._piece(part, "weight", ("float8_e4m3fn",)) for part in parts)
        source = parts[0].source
        scales = tuple(self._scalar(part.module, source.weight_scale) for part in parts)
        quantized = [module for module in shared if self.source.quantizes(module)]
        largest = tuple(dict.fromkeys(f"{module}.{source.weight_scale}" for module in quantized))
        inputs = tuple(dict.fromkeys(self._scalar(module, source.input_scale) for module in quantized))
        yield "weight", dtype_named("float8_e4m3fn"), _shape(parts), Rescaled(weights, scales, largest)
        yield "weights_scaling_factor", FLOAT32, (1,), StoredScalar(largest)
        yield "activation_scaling_factor", FLOAT32, (1,), StoredScalar(inputs)

    def _fp8_rows(self, parts: "tuple[_Part, ...]") -> "Iterator[_Tensor]":
        weights = tuple(self._piece(part, "weight", ("float8_e4m3fn",)) for part in parts)
        out, inputs = _shape(parts)
        yield "weight", dtype_named("float8_e4m3fn"), (out, inputs), Repacked(weights)
        scales: Content
        if parts[0].source.packing == "fp8_one_scale":
            names = tuple(self._scalar(part.module, "weight_scale") for part in parts)
            scales = StoredScalarRows(names, tuple(part.weight.cuts for part in parts))
        else:
            scales = _cast(tuple(self._column(part, "weight_scale", FLOATS) for part in parts))
        yield "per_channel_scale", FLOAT32, (out,), scales

    def _nvfp4(self, parts: "tuple[_Part, ...]") -> "Iterator[_Tensor]":
        """Parts must share one per-tensor scale: E4M3 block scales are relative to it; a new one would round them."""
        out, inputs = _shape(parts)
        weights = tuple(self._piece(part, "weight", ("uint8",), columns=2) for part in parts)
        blocks = tuple(self._piece(part, "weight_scale", ("float8_e4m3fn",), columns=NVFP4_BLOCK) for part in parts)
        tensor_scales = tuple(dict.fromkeys(self._scalar(part.module, "weight_scale_2") for part in parts))
        self._alike.append(tensor_scales)
        yield "weight", dtype_named("uint8"), (out, inputs // 2), Repacked(weights)
        yield "weights_scaling_factor", dtype_named("float8_e4m3fn"), (out, inputs // NVFP4_BLOCK), Repacked(blocks)
        yield "weights_scaling_factor_2", FLOAT32, (1,), StoredScalar(tensor_scales)
        yield "activation_scaling_factor", FLOAT32, (1,), self._largest(parts, "input_scale")

    def _part(self, weight: Piece) -> "_Part":
        out, inputs = weight.shape[::-1] if weight.transposed else weight.shape
        module = weight.source.removesuffix(".weight")
        source = self.source.of(module)
        assert source is not None, f"{module} is not quantised"
        return _Part(module, out, inputs, weight, source)

    def _piece(
        self,
        part: "_Part",
        suffix: str,
        dtypes: tuple[str, ...],
        *,
        rows: int = 1,
        columns: int = 1,
        transposed: bool = False,
    ) -> Piece:
        """A part's packed matrix: one element for `rows` outputs and `columns` inputs of a weight."""
        if part.weight.transposed and not transposed:
            raise ForgeError(
                f"{part.module} is a Conv1D layer, which is not converted from {self.source.tool} checkpoints",
                hint="Convert the original float16 or bfloat16 checkpoint; trtforge quantises it.",
            )
        cuts = tuple(self._packed(part, cut, rows, columns) for cut in part.weight.cuts)
        shape = (part.out // rows, part.inputs // columns)
        name = f"{part.module}.{suffix}"
        self._expect(name, shape[::-1] if transposed else shape, dtypes)
        return Piece(name, self._tensors[name].shape, cuts, transposed)

    def _packed(self, part: "_Part", cut: Cut, rows: int, columns: int) -> Cut:
        for what, size, edges in (
            ("outputs", rows, [edge for span in cut.rows for edge in (span.start, span.stop)]),
            ("inputs", columns, [cut.cols.start, cut.cols.stop]),
        ):
            if any(edge % size for edge in edges):
                raise ForgeError(
                    f"{part.module}: a rank's {what} are not a multiple of {size}, the {self.source.tool} packing",
                    hint="Choose a smaller --tp, or convert the original checkpoint.",
                )
        spans = tuple(range(span.start // rows, span.stop // rows) for span in cut.rows)
        return Cut(spans, range(cut.cols.start // columns, cut.cols.stop // columns))

    def _column(self, part: "_Part", suffix: str, dtypes: tuple[str, ...]) -> Piece:
        """A part's vector over its outputs."""
        name = f"{part.module}.{suffix}"
        self._expect(name, (part.out,), dtypes)
        cuts = tuple(replace(cut, cols=range(1)) for cut in part.weight.cuts)
        return Piece(name, (part.out,), cuts)

    def _scalar(self, module: str, suffix: str) -> str:
        name = f"{module}.{suffix}"
        self._expect(name, (1,), FLOATS, holds="a_scale")
        return name

    def _expect(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...],
        *,
        holds: Holds = "anything",
        code: int = 0,
        optional: bool = False,
    ) -> None:
        self._tensors[name] = Expected(shape, dtypes, holds, code, optional)


_Tensor = tuple[str, Dtype, tuple[int, ...], Content]
FLOAT32 = dtype_named("float32")


@dataclass(frozen=True)
class _Part:
    """A module with `out` outputs and `inputs` inputs; `weight` cuts its matrix for the ranks."""

    module: str
    out: int
    inputs: int
    weight: Piece
    source: QuantizedSource


def _shape(parts: tuple[_Part, ...]) -> tuple[int, int]:
    """(out, in) on one rank."""
    return sum(part.weight.cuts[0].height for part in parts), len(parts[0].weight.cuts[0].cols)


def _cast(pieces: tuple[Piece, ...]) -> Cast:
    return Cast(pieces, (0,) * len(pieces[0].cuts))


def attention_module(family: Family) -> str:
    """The module that holds the query, key and value projections of a layer, such as self_attn."""
    row = next(row for row in family.linears if row.target == "attention.qkv")
    return row.parts[0].module.rpartition(".")[0]


def require_dense(family: Family, facts: Facts, source: QuantizedSource) -> None:
    """Raises ForgeError for layers that cannot be repacked: experts and multi-head latent attention."""
    layers = range(facts.sizes.num_layers)
    for row in family.layer:
        if not isinstance(row, Experts | AbsorbedQuery) or not any(facts.holds(row.when, layer) for layer in layers):
            continue
        what = "a mixture of experts" if isinstance(row, Experts) else "multi-head latent attention"
        raise ForgeError(
            f"an already quantised ({source.tool}) {family.name} model with {what} is not converted: "
            f"TensorRT-LLM fuses {row.target} from matrices with different scales",
            hint="Convert the original float16 or bfloat16 checkpoint.",
        )
