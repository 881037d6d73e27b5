"""Writes weights such that TensorRT-LLM's build rounds them to the INT4 codes of a calibration.

The build takes the largest magnitude of an output / 8 as its scale, and clamps 8 to 7 (runtime.linears.weight_only). So
a code of 7 is written as eight steps: then the build finds the scale of the codes for each output with a code of 7 or
-8.
"""

import torch

from trtforge.convert.encode import Bytes, as_bytes
from trtforge.convert.rounded import Packing, require_fit, rounded_columns, rounded_scales
from trtforge.core.dtypes import Dtype
from trtforge.formats.calibration import Calibration
from trtforge.formats.shards import RowReader
from trtforge.models.content import Piece
from trtforge.models.split import Cut
from trtforge.models.transforms import TORCH

_HIGHEST = 7  # code; the build clamps 8 to it


class RoundedRows:
    """The rows of a piece by the calibration's codes; `found`: whether the calibration contains them."""

    def __init__(self, piece: Piece, calibration: Calibration | None, dtype: Dtype) -> None:
        rounded = calibration.rounded if calibration is not None else {}
        self._rounded = rounded.get(piece.source.removesuffix(".weight"))
        self._dtype = TORCH[dtype.name]
        self._packing = Packing(2, 1, piece.shape[0 if piece.transposed else 1], "int8", "float32")
        if self._rounded is not None:
            require_fit(piece, self._rounded, self._packing)
        self._reader = RowReader()

    @property
    def found(self) -> bool:
        return self._rounded is not None

    def __enter__(self) -> "RoundedRows":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def part(self, rows: range, cut: Cut) -> Bytes:
        """The values of some rows in a rank's columns, in the checkpoint's dtype.

        Raises ForgeError for a scale that is not a finite number above zero.
        """
        assert self._rounded is not None, "only where codes were found"
        levels = rounded_columns(self._reader, self._rounded, rows, cut).to(torch.int16)
        levels += levels == _HIGHEST
        scales = rounded_scales(self._reader, self._rounded, rows)
        return as_bytes((levels.float() * scales).to(self._dtype))
