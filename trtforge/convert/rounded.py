"""Codes that calibration rounded with compensation: reads a rank's part of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.formats.calibration import RoundedWeight
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.models.content import Piece
from trtforge.models.formats import Rounding
from trtforge.models.split import Cut
from trtforge.models.transforms import TORCH, pack_int4, unpack_int4


@dataclass(frozen=True)
class Packing:
    """How a format packs codes: two outputs or two inputs per byte, one scale per `group_size` inputs.

    `codes` and `scales`: TensorRT-LLM's names of their dtypes.
    """

    outputs: int
    inputs: int
    group_size: int
    codes: str
    scales: str


def packing_of(rounding: Rounding, group_size: int) -> Packing | None:
    """The packing of a format with compensated rounding, else None."""
    match rounding:
        case "int4":
            return Packing(2, 1, group_size, "int8", "float32")
        case "nvfp4":
            return Packing(1, 2, NVFP4_BLOCK, "uint8", "float8_e4m3fn")
        case _:
            return None


def require_fit(piece: Piece, rounded: RoundedWeight, packing: Packing) -> None:
    """Raises ForgeError unless codes and scales have the shapes of the piece's matrix and the format's dtypes."""
    out, inputs = piece.shape[::-1] if piece.transposed else piece.shape
    for stored, dtype, shape in (
        (rounded.codes, packing.codes, (out // packing.outputs, inputs // packing.inputs)),
        (rounded.scales, packing.scales, (out, inputs // packing.group_size)),
    ):
        found = stored.spec
        if found.shape != shape or found.dtype.name != dtype:
            wrong = f"has the shape {list(found.shape)}, not {list(shape)}"
            if found.shape == shape:
                wrong = f"is {found.dtype.name}, not {dtype}"
            raise ForgeError(
                f"{stored.file}: {found.name} {wrong}",
                hint="The calibration belongs to another model or was edited: calibrate again with --force.",
            )


def rounded_part(
    reader: RowReader, rounded: RoundedWeight, rows: range, cut: Cut, packing: Packing
) -> tuple[Tensor, Tensor]:
    """The packed codes, (rows / 2, columns) or (rows, columns / 2), and the scales (rows, groups) of some rows in a
    rank's columns.

    Raises ForgeError for a scale that is not a finite number above zero.
    """
    columns = slice(cut.cols.start // packing.inputs, cut.cols.stop // packing.inputs)
    if rows.start % packing.outputs or rows.stop % packing.outputs:
        packed = pack_int4(rounded_columns(reader, rounded, rows, cut))
    else:
        packed = _rows(reader, rounded.codes, range(rows.start // packing.outputs, rows.stop // packing.outputs))
        packed = packed[:, columns]
    groups = slice(cut.cols.start // packing.group_size, cut.cols.stop // packing.group_size)
    return packed, rounded_scales(reader, rounded, rows)[:, groups]


def rounded_columns(reader: RowReader, rounded: RoundedWeight, rows: range, cut: Cut) -> Tensor:
    """(rows, columns) int8 INT4 codes of some rows in a rank's columns."""
    pairs = range(rows.start // 2, -(-rows.stop // 2))
    packed = _rows(reader, rounded.codes, pairs)[:, cut.cols.start : cut.cols.stop]
    first = rows.start - 2 * pairs.start
    return unpack_int4(packed)[first : first + len(rows)]


def rounded_scales(reader: RowReader, rounded: RoundedWeight, rows: range) -> Tensor:
    """(rows, groups) scales. Raises ForgeError for a scale that is not a finite number above zero."""
    scales = _rows(reader, rounded.scales, rows)
    numbers = scales.float()
    if not bool((numbers.isfinite() & (numbers > 0)).all()):
        raise ForgeError(
            f"{rounded.scales.file}: {rounded.scales.spec.name} holds a scale that is not a finite number above zero",
            hint="The calibration is damaged or was edited: calibrate again with --force.",
        )
    return scales


def _rows(reader: RowReader, stored: StoredTensor, rows: range) -> Tensor:
    data = bytearray(len(rows) * stored.spec.row_bytes)
    reader.read(stored, rows.start, rows.stop, memoryview(data))
    return torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name]).view(len(rows), -1)
