"""Stacks of experts from an already quantised source.

Layouts: ModelOpt's export/layer_utils.py and tensorrt_llm/layers/moe.py.
"""

from collections.abc import Iterator

from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.formats.quantized_source import QuantizedSource
from trtforge.formats.shards import TensorSpec
from trtforge.models.content import Repacked, Rescaled, StoredPreQuant, StoredScalars, Target
from trtforge.models.prequantized_targets import FLOAT32, NamedContent, QuantizedRows
from trtforge.models.quantized_targets import Matrix
from trtforge.models.stored_parts import StoredPart


class QuantizedLayers(QuantizedRows):
    """Creates the targets of a quantised source's linear layers and experts."""

    def experts(self, matrix: Matrix, stage: int) -> Iterator[Target]:
        """The tensors of a stack of experts. Raises ForgeError unless all experts are quantised alike, in a format that
        TensorRT-LLM's mixture of experts has."""
        if not self.takes(matrix.readers):
            raise ForgeError(
                f"{matrix.readers[0]} and the other experts are not quantised, and other layers are: they cannot be "
                "excluded",
                hint="Convert the original float16 or bfloat16 checkpoint.",
            )
        parts = tuple(self.part(piece) for piece in matrix.pieces)
        packing, format = parts[0].source.packing, parts[0].source.format
        self.expect_zero_biases(parts)
        match packing:
            case "awq" | "gptq" | "pack_quantized" | "modelopt_int4":
                contents = self._int4_experts(matrix, parts)
            case "fp8":
                contents = self._fp8_experts(matrix, parts)
            case "nvfp4":
                contents = self._nvfp4_experts(matrix, parts)
            case _:
                raise ForgeError(
                    f"{matrix.readers[0]}: TensorRT-LLM's mixtures of experts do not support {format}",
                    hint="Convert the original float16 or bfloat16 checkpoint.",
                )
        for suffix, dtype, shape, content in contents:
            yield Target(TensorSpec(f"{matrix.name}.{suffix}", dtype, shape), stage, content)

    def _int4_experts(self, matrix: Matrix, parts: tuple[StoredPart, ...]) -> Iterator[NamedContent]:
        """A layer's experts share one scale of their inputs."""
        (out, inputs), group = matrix.shape, parts[0].source.group_size
        for part in parts:
            for cut in part.weight.cuts:
                self.packed(part, cut, 2, group)
        yield "weight", dtype_named("int8"), matrix.stacked(out // 2, inputs), self.codes(parts)
        scales = self.int4_scales(parts, inputs // group)
        yield "weights_scaling_factor", FLOAT32, matrix.stacked(out, inputs // group), scales
        names = self.pre_quant_names(parts)
        vector = StoredPreQuant(names, matrix.cuts, matrix.experts)
        yield "prequant_scaling_factor", self.dtype, matrix.stacked(inputs), vector

    def _fp8_experts(self, matrix: Matrix, parts: tuple[StoredPart, ...]) -> Iterator[NamedContent]:
        """An expert's joined matrices share one scale (ModelOpt's export/layer_utils.py); all share that of inputs."""
        source = parts[0].source
        weights = tuple(self.piece(part, "weight", ("float8_e4m3fn",)) for part in parts)
        scales = tuple(self.scalar(part.module, source.weight_scale) for part in parts)
        shared = tuple(tuple(f"{module}.{source.weight_scale}" for module in modules) for modules in matrix.shared)
        yield "weight", dtype_named("float8_e4m3fn"), matrix.stacked(*matrix.shape), Rescaled(weights, scales, shared)
        yield "weights_scaling_factor", FLOAT32, matrix.stacked(1), _of_experts(matrix, source.weight_scale, source)
        yield "activation_scaling_factor", FLOAT32, (1,), self.input_scale(parts)

    def _nvfp4_experts(self, matrix: Matrix, parts: tuple[StoredPart, ...]) -> Iterator[NamedContent]:
        out, inputs = matrix.shape
        source = parts[0].source
        weights, blocks = self.nvfp4_pieces(parts)
        for part in parts:
            self.scalar(part.module, source.tensor_scale, divisor=source.divisors)
        self.alike += [tuple(f"{module}.{source.tensor_scale}" for module in modules) for modules in set(matrix.shared)]
        block_scales = matrix.stacked(out, inputs // NVFP4_BLOCK)
        yield "weight", dtype_named("uint8"), matrix.stacked(out, inputs // 2), Repacked(weights)
        yield "weights_scaling_factor", dtype_named("float8_e4m3fn"), block_scales, Repacked(blocks, scales=True)
        yield "weights_scaling_factor_2", FLOAT32, matrix.stacked(1), _of_experts(matrix, source.tensor_scale, source)
        yield "activation_scaling_factor", FLOAT32, (1,), self.input_scale(parts)


def _of_experts(matrix: Matrix, suffix: str, source: QuantizedSource) -> StoredScalars:
    """(experts, 1): the largest of the scalars of each expert's modules."""
    groups = tuple(
        tuple(tuple(f"{module}.{suffix}" for module in modules) for modules in of_rank)
        for of_rank in matrix.rank_groups
    )
    return StoredScalars(groups, source.divisors)
