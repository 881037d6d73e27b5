"""Targets of linear layers from an already quantised source.

Layouts: TensorRT-LLM quantization/layers.py, as ModelOpt's `export_tensorrt_llm_checkpoint` writes them.
"""

from collections.abc import Iterator

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
    StoredRowScales,
    StoredScalar,
    StoredScalarRows,
    Target,
)
from trtforge.models.family import AbsorbedQuery, Experts, Facts, Family
from trtforge.models.stored_parts import FLOATS, StoredPart, StoredParts

FLOAT32 = dtype_named("float32")
_CODES_PER_WORD = 8
NamedContent = tuple[str, Dtype, tuple[int, ...], Content]
"""A tensor of a layer: name suffix, dtype, shape and content."""


class QuantizedRows(StoredParts):
    """Creates the targets of a quantised source's linear layers."""

    def linear(
        self, name: str, weights: tuple[Piece, ...], shared: tuple[str, ...], stage: int, *, biased: bool
    ) -> Iterator[Target]:
        """The tensors of a linear layer, except its bias.

        `weights`: the pieces of the matrices in an equivalent unquantised source; `shared`: the modules that share FP8
        scales with this layer, including its own.
        """
        self.require_one_format(shared)
        parts = tuple(self.part(piece) for piece in weights)
        packing = parts[0].source.packing
        if not biased:
            self.expect_zero_biases(parts)
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

    def expect_zero_biases(self, parts: tuple[StoredPart, ...]) -> None:
        """Expect zero biases, which AutoGPTQ writes for layers without a bias."""
        for part in parts:
            if part.source.packing == "gptq":
                self.expect(f"{part.module}.bias", (part.out,), FLOATS, holds="zeros", optional=True)

    def kv_scale(self, attention: str) -> StoredScalar:
        """A layer's FP8 KV cache scale, at least 1 as in ModelOpt's export/postprocess.py."""
        names = tuple(f"{attention}.{name}" for name in KV_SCALES)
        for name in names:
            self.expect(name, (1,), FLOATS, holds="a_scale", optional=True)
        return StoredScalar(names, least=1.0)

    def _int4(self, parts: tuple[StoredPart, ...]) -> Iterator[NamedContent]:
        out, inputs = _shape(parts)
        source, group = parts[0].source, parts[0].source.group_size
        for part in parts:
            for cut in part.weight.cuts:
                self.packed(part, cut, 2, group)
        yield "weight", dtype_named("int8"), (out // 2, inputs), self.codes(parts)
        scales = self.int4_scales(parts, inputs // group)
        yield "weights_scaling_factor", FLOAT32, (out, inputs // group), scales
        if source.packing == "modelopt_w4a8":
            yield "weights_scaling_factor_2", FLOAT32, (1,), self.largest(parts, "weight_scale_2")
            yield "activation_scaling_factor", FLOAT32, (1,), self.input_scale(parts)
        yield self._pre_quant(parts)

    def _int8(self, parts: tuple[StoredPart, ...]) -> Iterator[NamedContent]:
        """SmoothQuant's tensors; for INT8 without SmoothQuant, the pre-quantisation scales are ones."""
        weights = tuple(self.piece(part, "weight", ("int8",)) for part in parts)
        out, inputs = _shape(parts)
        yield "weight", dtype_named("int8"), (out, inputs), Repacked(weights)
        scales = cast_of(tuple(self.column(part, part.source.weight_scale, FLOATS) for part in parts))
        yield "weights_scaling_factor", FLOAT32, (out,), scales
        yield "activation_scaling_factor", FLOAT32, (1,), self.input_scale(parts)
        yield self._pre_quant(parts)

    def _pre_quant(self, parts: tuple[StoredPart, ...]) -> NamedContent:
        """The pre-quantisation scale, which the parts must share; ones if the source has none."""
        cuts = parts[0].weight.cuts
        vector = StoredPreQuant(self.pre_quant_names(parts), cuts)
        return "prequant_scaling_factor", self.dtype, (len(cuts[0].cols),), vector

    def pre_quant_names(self, parts: tuple[StoredPart, ...]) -> tuple[str, ...]:
        """The parts' pre-quantisation scales, which must be equal; empty for packings without them."""
        if parts[0].source.packing not in ("modelopt_int4", "modelopt_w4a8", "int8_rows"):
            return ()
        names = tuple(dict.fromkeys(f"{part.module}.pre_quant_scale" for part in parts))
        for name in names:
            self.expect(name, (parts[0].inputs,), FLOATS, optional=True)
        self.alike.append(names)
        return names

    def largest(self, parts: tuple[StoredPart, ...], suffix: str, *, divisors: bool = False) -> StoredScalar:
        """The largest of the parts' scalars, or of their inverses, which fits the values of each part."""
        names = tuple(dict.fromkeys(self.scalar(part.module, suffix, divisor=divisors) for part in parts))
        return StoredScalar(names, divisors=divisors)

    def input_scale(self, parts: tuple[StoredPart, ...]) -> StoredScalar:
        """The largest of the parts' scales of inputs, which must be above zero."""
        source = parts[0].source
        found = self.largest(parts, source.input_scale, divisors=source.divisors)
        self.input_scales.append(found.names)
        return found

    def codes(self, parts: tuple[StoredPart, ...]) -> Repacked:
        """The packed 4-bit codes."""
        words, byte = ("int32",), ("uint8", "int8")
        match parts[0].source.packing:
            case "awq":
                pieces = [self.piece(p, "qweight", words, rows=_CODES_PER_WORD, transposed=True) for p in parts]
                return Repacked(tuple(pieces), "awq")
            case "gptq":
                pieces = [self.piece(p, "qweight", words, columns=_CODES_PER_WORD, transposed=True) for p in parts]
                return Repacked(tuple(pieces), "gptq")
            case "pack_quantized":
                for part in parts:
                    self.expect(f"{part.module}.weight_shape", (2,), ("int64", "int32"))
                pieces = [self.piece(p, "weight_packed", words, columns=_CODES_PER_WORD) for p in parts]
                return Repacked(tuple(pieces), "gptq")
            case _:
                return Repacked(tuple(self.piece(p, "weight", byte, rows=2) for p in parts))

    def int4_scales(self, parts: tuple[StoredPart, ...], groups: int) -> Cast | StoredRowScales:
        """The scales (out, `groups`) of 4-bit codes, whose zero points must be symmetric."""
        source = parts[0].source
        transposed = source.packing in ("awq", "gptq")
        suffix = "scales" if transposed else "weight_scale"
        for part in parts if transposed else ():
            self._expect_symmetric(part, part.inputs if source.scale_per_output else source.group_size)
        if not source.scale_per_output:
            columns = source.group_size
            pieces = [self.piece(p, suffix, FLOATS, columns=columns, transposed=transposed) for p in parts]
            return cast_of(tuple(pieces))
        names = tuple(f"{part.module}.{suffix}" for part in parts)
        for name, part in zip(names, parts, strict=True):
            self.expect(name, (part.out,), FLOATS)
        return StoredRowScales(names, tuple(part.weight.cuts for part in parts), groups)

    def _expect_symmetric(self, part: StoredPart, group: int) -> None:
        """Expect symmetric zero points of AutoAWQ or GPTQ, one per output and `group` inputs, and GPTQ's inputs in
        order."""
        zeros, code = (part.inputs // group, part.out // _CODES_PER_WORD), part.source.stored_zero
        self.expect(f"{part.module}.qzeros", zeros, ("int32",), holds="zero_points", code=code)
        if part.source.packing == "gptq":
            name, indices = f"{part.module}.g_idx", ("int32", "int64")
            self.expect(name, (part.inputs,), indices, holds="groups_in_order", code=group, optional=True)

    def _fp8(self, parts: tuple[StoredPart, ...], shared: tuple[str, ...]) -> Iterator[NamedContent]:
        weights = tuple(self.piece(part, "weight", ("float8_e4m3fn",)) for part in parts)
        source = parts[0].source
        scales = tuple(self.scalar(part.module, source.weight_scale) for part in parts)
        quantized = [module for module in shared if self.source.quantizes(module)]
        largest = tuple(dict.fromkeys(f"{module}.{source.weight_scale}" for module in quantized))
        inputs = tuple(dict.fromkeys(self.scalar(module, source.input_scale) for module in quantized))
        self.input_scales.append(inputs)
        rescaled = Rescaled(weights, scales, (largest,) * len(weights))
        yield "weight", dtype_named("float8_e4m3fn"), _shape(parts), rescaled
        yield "weights_scaling_factor", FLOAT32, (1,), StoredScalar(largest)
        yield "activation_scaling_factor", FLOAT32, (1,), StoredScalar(inputs)

    def _fp8_rows(self, parts: tuple[StoredPart, ...]) -> Iterator[NamedContent]:
        weights = tuple(self.piece(part, "weight", ("float8_e4m3fn",)) for part in parts)
        out, inputs = _shape(parts)
        yield "weight", dtype_named("float8_e4m3fn"), (out, inputs), Repacked(weights)
        scales: Content
        if parts[0].source.packing == "fp8_one_scale":
            names = tuple(self.scalar(part.module, "weight_scale") for part in parts)
            scales = StoredScalarRows(names, tuple(part.weight.cuts for part in parts))
        else:
            scales = cast_of(tuple(self.column(part, "weight_scale", FLOATS) for part in parts))
        yield "per_channel_scale", FLOAT32, (out,), scales

    def _nvfp4(self, parts: tuple[StoredPart, ...]) -> Iterator[NamedContent]:
        """Parts must share one per-tensor scale: E4M3 block scales are relative to it; a new scale would round them."""
        (out, inputs), source = _shape(parts), parts[0].source
        weights, blocks = self.nvfp4_pieces(parts)
        tensor_scales = self.largest(parts, source.tensor_scale, divisors=source.divisors)
        self.alike.append(tensor_scales.names)
        yield "weight", dtype_named("uint8"), (out, inputs // 2), Repacked(weights)
        block_scales = Repacked(blocks, scales=True)
        yield "weights_scaling_factor", dtype_named("float8_e4m3fn"), (out, inputs // NVFP4_BLOCK), block_scales
        yield "weights_scaling_factor_2", FLOAT32, (1,), tensor_scales
        yield "activation_scaling_factor", FLOAT32, (1,), self.input_scale(parts)

    def nvfp4_pieces(self, parts: tuple[StoredPart, ...]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """The codes, two inputs per byte, and the block scales."""
        codes = tuple(self.piece(part, part.source.weight, ("uint8",), columns=2) for part in parts)
        blocks = tuple(self.piece(part, "weight_scale", ("float8_e4m3fn",), columns=NVFP4_BLOCK) for part in parts)
        return codes, blocks


def _shape(parts: tuple[StoredPart, ...]) -> tuple[int, int]:
    """(out, in) on one rank."""
    return sum(part.weight.cuts[0].height for part in parts), len(parts[0].weight.cuts[0].cols)


def cast_of(pieces: tuple[Piece, ...]) -> Cast:
    """The pieces, cast to the target's dtype."""
    return Cast(pieces, (0,) * len(pieces[0].cuts))


def attention_module(family: Family) -> str:
    """The module with the query, key and value projections of a layer, such as self_attn."""
    row = next(row for row in family.linears if row.target == "attention.qkv")
    return row.parts[0].module.rpartition(".")[0]


def require_separate(family: Family, facts: Facts, source: QuantizedSource) -> None:
    """Raises ForgeError for layers that cannot be repacked: multi-head latent attention, and experts in one tensor or
    in mixed precision."""
    layers = range(facts.sizes.num_layers)
    for row in family.layer:
        if not isinstance(row, Experts | AbsorbedQuery) or not any(facts.holds(row.when, layer) for layer in layers):
            continue
        what = "multi-head latent attention"
        if isinstance(row, Experts):
            if not row.stacked and not source.mixed:
                continue
            what = "experts in one tensor" if row.stacked else "experts in mixed precision"
        raise ForgeError(
            f"an already quantised ({source.tool}) {family.name} model with {what} is not converted",
            hint="Convert the original float16 or bfloat16 checkpoint.",
        )
