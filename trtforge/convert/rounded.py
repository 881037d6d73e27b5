"""Codes that calibration rounded with compensation: reads a rank's part of them."""

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.formats.calibration import RoundedWeight
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.models.content import Piece
from trtforge.models.split import Cut
from trtforge.models.transforms import TORCH, pack_int4, unpack_int4


def require_fit(piece: Piece, rounded: RoundedWeight, group_size: int) -> None:
    """Raises ForgeError unless the codes and scales have the shapes of the piece's matrix."""
    out, inputs = piece.shape[::-1] if piece.transposed else piece.shape
    for stored, shape in ((rounded.codes, (out // 2, inputs)), (rounded.scales, (out, inputs // group_size))):
        if stored.spec.shape != shape:
            raise ForgeError(
                f"{stored.file}: {stored.spec.name} has the shape {list(stored.spec.shape)}, not {list(shape)}",
                hint="The calibration belongs to another model or was edited: calibrate again with --force.",
            )


def rounded_part(
    reader: RowReader, rounded: RoundedWeight, rows: range, cut: Cut, group_size: int
) -> tuple[Tensor, Tensor]:
    """The packed codes (rows / 2, columns) and the scales (rows, groups) of some rows in a rank's columns.

    Raises ForgeError for a scale that is not a finite number above zero.
    """
    columns = slice(cut.cols.start, cut.cols.stop)
    pairs = range(rows.start // 2, -(-rows.stop // 2))
    packed = _rows(reader, rounded.codes, pairs)[:, columns]
    if rows.start % 2 or rows.stop % 2:
        first = rows.start - 2 * pairs.start
        packed = pack_int4(unpack_int4(packed)[first : first + len(rows)])
    groups = slice(cut.cols.start // group_size, cut.cols.stop // group_size)
    scales = _rows(reader, rounded.scales, rows)[:, groups]
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise ForgeError(
            f"{rounded.scales.file}: {rounded.scales.spec.name} holds a scale that is not a finite number above zero",
            hint="The calibration is damaged or was edited: calibrate again with --force.",
        )
    return packed, scales


def _rows(reader: RowReader, stored: StoredTensor, rows: range) -> Tensor:
    data = bytearray(len(rows) * stored.spec.row_bytes)
    reader.read(stored, rows.start, rows.stop, memoryview(data))
    return torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name]).view(len(rows), -1)
