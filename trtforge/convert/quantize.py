"""Quantises slabs of a weight: divides by the smoothing vector, computes row and block scales, rounds.

If the calibration contains codes (compensated rounding), they are used instead.
"""

import torch
from torch import Tensor

from trtforge.convert.encode import Bytes, Part, as_bytes, as_tensor
from trtforge.convert.rounded import packing_of, require_fit, rounded_part
from trtforge.convert.smoothing import folding_vector, needed
from trtforge.core.dtypes import Dtype
from trtforge.formats.calibration import Calibration, RoundedWeight
from trtforge.formats.shards import RowReader
from trtforge.models.content import Piece, Quantized
from trtforge.models.split import Cut
from trtforge.models.transforms import (
    fp8_row_scales,
    fp8_scale,
    int4_scales,
    int8_row_scales,
    nvfp4_block_scales,
    nvfp4_global_scale,
    pack_int4,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
)


class Quantizer:
    """Quantises one target. Row scales are computed over whole rows, also if a rank gets only some columns."""

    def __init__(self, content: Quantized, calibration: Calibration | None, model_dtype: Dtype) -> None:
        self._content, self._calibration = content, calibration
        self._fold: Tensor | None = None
        if content.smoothing:
            modules = content.smoothed_with
            self._fold = folding_vector(needed(calibration), modules, content.smoothing, model_dtype)
        self._global: list[Tensor] = []
        if content.rounding in ("fp8", "nvfp4"):
            scale = fp8_scale if content.rounding == "fp8" else nvfp4_global_scale
            self._global = [scale(self._weight_amax(modules)) for modules in content.scaled_with]
        self._reader = RowReader()
        self._packing = packing_of(content.rounding, content.group_size)
        self._rounded = [self._compensated(piece) for piece in content.pieces]

    def __enter__(self) -> "Quantizer":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def row_scales(self, slab: Part, dtype: Dtype) -> Tensor | None:
        """(rows,) float32 scales of whole rows; None for formats without row scales."""
        match self._content.rounding:
            case "int8":
                return int8_row_scales(self._folded(slab, dtype, slice(None)))
            case "fp8_rowwise":
                return fp8_row_scales(as_tensor(slab, dtype))
            case _:
                return None

    def encode(
        self, piece: int, part: Part, dtype: Dtype, cut: Cut, rows: range, row_scales: Tensor | None
    ) -> tuple[Bytes, Bytes | None]:
        """A rank's codes for the rows `rows` of a piece, and their row or block scales (None for per-tensor FP8)."""
        rounded = self._rounded[piece]
        if rounded is not None and self._packing is not None:
            codes, block_scales = rounded_part(self._reader, rounded, rows, cut, self._packing)
            return as_bytes(codes), as_bytes(block_scales)
        columns = slice(cut.cols.start, cut.cols.stop)
        weight = self._folded(part, dtype, columns)
        match self._content.rounding:
            case "fp8":
                return as_bytes(quantize_fp8(weight, self._global[piece])), None
            case "fp8_rowwise":
                assert row_scales is not None
                return as_bytes(quantize_fp8(weight, row_scales.unsqueeze(1))), as_bytes(row_scales)
            case "int8":
                assert row_scales is not None
                return as_bytes(quantize_int8(weight, row_scales)), as_bytes(row_scales)
            case "int4":
                scales = int4_scales(weight, self._content.group_size)
                scales = self._clipped(scales, piece, rows, cut)
                return as_bytes(pack_int4(quantize_int4(weight, scales))), as_bytes(scales)
            case "nvfp4":
                blocks = nvfp4_block_scales(weight, self._global[piece])
                return as_bytes(quantize_nvfp4(weight, blocks, self._global[piece])), as_bytes(blocks)

    def _folded(self, part: Part, dtype: Dtype, columns: slice) -> Tensor:
        weight = as_tensor(part, dtype).float()
        return weight if self._fold is None else weight / self._fold[columns]

    def _clipped(self, scales: Tensor, piece: int, rows: range, cut: Cut) -> Tensor:
        """The block scales times the clip ratios, if the calibration contains clip ratios."""
        module = self._content.pieces[piece].source.removesuffix(".weight")
        ratios = needed(self._calibration).clip_ratio(module)
        if ratios is None:
            return scales
        group = self._content.group_size
        return scales * ratios[rows.start : rows.stop, cut.cols.start // group : cut.cols.stop // group]

    def _compensated(self, piece: Piece) -> RoundedWeight | None:
        """The calibration's codes for a piece, None without. Raises ForgeError if their shape differs."""
        if self._packing is None:
            return None
        found = needed(self._calibration).rounded.get(piece.source.removesuffix(".weight"))
        if found is not None:
            require_fit(piece, found, self._packing)
        return found

    def _weight_amax(self, modules: tuple[str, ...]) -> Tensor:
        calibration = needed(self._calibration)
        return torch.stack([calibration.weight_amax(module) for module in modules]).amax(dim=0)
