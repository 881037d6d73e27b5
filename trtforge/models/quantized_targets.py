"""Targets of a linear layer that trtforge quantises: weights, scaling factors, pre-quantisation scales of every rank.

Layouts: TensorRT-LLM quantization/layers.py, as ModelOpt's `export_tensorrt_llm_checkpoint` writes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trtforge.core.dtypes import Dtype, dtype_named
from trtforge.core.number_limits import E2M1_MAX, FP8_MAX, INT8_MAX, NVFP4_BLOCK
from trtforge.formats.shards import TensorSpec
from trtforge.models.content import (
    ActivationScale,
    Content,
    Piece,
    PreQuantScale,
    Quantized,
    QuantizedScales,
    Target,
    WeightScale,
)
from trtforge.models.formats import NumberFormat
from trtforge.models.split import Cut

_FLOAT32, _FP8 = dtype_named("float32"), dtype_named("float8_e4m3fn")


@dataclass(frozen=True)
class Matrix:
    """An (out, in) weight on every rank, or a stack of `experts` of them.

    `shared`: for each piece, the modules that share its weight scale and activation scale. `readers`: the modules that
    share one pre-quantisation scale. `rank_groups`: for each rank, the groups of modules that share a weight scale (one
    group, or one per expert).
    """

    name: str
    pieces: tuple[Piece, ...]
    shape: tuple[int, int]
    shared: tuple[tuple[str, ...], ...]
    readers: tuple[str, ...]
    rank_groups: tuple[tuple[tuple[str, ...], ...], ...]
    experts: int | None = None

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """For each rank, the cut of one of its pieces, which has the rank's columns."""
        ranks = range(len(self.pieces[0].cuts))
        return tuple(next(piece.cuts[rank] for piece in self.pieces if piece.cuts[rank].rows) for rank in ranks)

    def stacked(self, *shape: int) -> tuple[int, ...]:
        """The shape, with the experts as first dimension if there are any."""
        return shape if self.experts is None else (self.experts, *shape)


def quantized_targets(
    matrix: Matrix, wanted: NumberFormat, group_size: int, model_dtype: Dtype, stage: int
) -> Iterator[Target]:
    """The weight and its scaling factors, in file order."""
    (out, inputs), name = matrix.shape, matrix.name
    smoothed = matrix.readers if wanted.smoothing else ()

    def target(suffix: str, dtype: Dtype, shape: tuple[int, ...], content: Content) -> Target:
        return Target(TensorSpec(f"{name}.{suffix}", dtype, shape), stage, content)

    def weight(dtype: Dtype, shape: tuple[int, ...], scales: Target | None = None) -> Target:
        assert wanted.rounding is not None
        content = Quantized(
            matrix.pieces,
            wanted.rounding,
            matrix.shared,
            wanted.smoothing,
            smoothed,
            group_size,
            scales.spec if scales else None,
        )
        return target("weight", dtype, shape, content)

    def held(suffix: str, dtype: Dtype, shape: tuple[int, ...]) -> Target:
        return target(suffix, dtype, shape, QuantizedScales())

    def tensor_scale(suffix: str, bound: float, smoothed_with: tuple[str, ...] = ()) -> Target:
        shape = (1,) if matrix.experts is None else (matrix.experts, 1)
        content = WeightScale(matrix.rank_groups, bound, wanted.smoothing, smoothed_with)
        return target(suffix, _FLOAT32, shape, content)

    def activation_scale(bound: float) -> Target:
        modules = tuple(dict.fromkeys(module for group in matrix.shared for module in group))
        content = ActivationScale(modules, bound, wanted.smoothing)
        return target("activation_scaling_factor", _FLOAT32, (1,), content)

    match wanted.rounding:
        case "fp8":
            yield weight(_FP8, matrix.stacked(out, inputs))
            yield tensor_scale("weights_scaling_factor", FP8_MAX)
            yield activation_scale(FP8_MAX)
        case "fp8_rowwise":
            scales = held("per_channel_scale", _FLOAT32, (out,))
            yield from (weight(_FP8, (out, inputs), scales), scales)
        case "int8":
            scales = held("weights_scaling_factor", _FLOAT32, (out,))
            yield from (weight(dtype_named("int8"), (out, inputs), scales), scales)
            yield activation_scale(INT8_MAX)
        case "int4":
            scales = held("weights_scaling_factor", _FLOAT32, matrix.stacked(out, inputs // group_size))
            yield from (weight(dtype_named("int8"), matrix.stacked(out // 2, inputs), scales), scales)
            if wanted.static_activations:
                yield tensor_scale("weights_scaling_factor_2", FP8_MAX, smoothed)
                yield activation_scale(FP8_MAX)
        case "nvfp4":
            scales = held("weights_scaling_factor", _FP8, matrix.stacked(out, inputs // NVFP4_BLOCK))
            yield from (weight(dtype_named("uint8"), matrix.stacked(out, inputs // 2), scales), scales)
            yield tensor_scale("weights_scaling_factor_2", E2M1_MAX * FP8_MAX)
            yield activation_scale(E2M1_MAX * FP8_MAX)
    if wanted.smoothing:
        content = PreQuantScale(matrix.readers, wanted.smoothing, matrix.cuts, matrix.experts)
        yield target("prequant_scaling_factor", model_dtype, matrix.stacked(inputs), content)
