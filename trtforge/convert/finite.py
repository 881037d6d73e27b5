"""What becomes of source weights that are NaN or infinite: an error, or a warning where the user allows them."""

import logging
from collections.abc import Iterable

from trtforge.core.errors import ForgeError
from trtforge.formats.finite import first_nonfinite, is_nan
from trtforge.formats.shards import StoredTensor
from trtforge.models.content import Content, Quantized

_LOG = logging.getLogger(__name__)


class FiniteWeights:
    """Looks at every slab of the source as it is read. One thread at a time uses it.

    `allowed`: a tensor with such weights is a warning, unless it is rounded to a number format: a row or block with
    one of them has no scale.
    """

    def __init__(self, *, allowed: bool = False, rounded: Iterable[str] = ()) -> None:
        self._allowed, self._rounded = allowed, frozenset(rounded)
        self._warned: set[str] = set()

    def look(self, stored: StoredTensor, rows: range, columns: range, data: memoryview) -> None:
        """`data`: these rows and columns of the matrix in the file. Raises ForgeError naming tensor, file and place."""
        found = first_nonfinite(data, stored.spec.dtype)
        name = stored.spec.name
        if found is None or name in self._warned:
            return
        value = "NaN" if is_nan(data, stored.spec.dtype, found) else "an infinity"
        row, column = rows[found // len(columns)], columns[found % len(columns)]
        place = f"[{row}]" if len(stored.spec.shape) == 1 else f"[{row}, {column}]"
        message = f"{stored.file}: {name} holds {value} at {place}"
        if not self._allowed:
            raise ForgeError(
                message,
                hint="Download the checkpoint again; if it is meant so, give --allow-nonfinite "
                "(model.allow_nonfinite in a recipe).",
            )
        if name in self._rounded:
            raise ForgeError(
                f"{message}, and has no scale in the number format that is asked for",
                hint="Leave the layer unquantised with --exclude-module, or download the checkpoint again.",
            )
        self._warned.add(name)
        _LOG.warning("%s: converted as it is (--allow-nonfinite)", message)


def rounded_sources(contents: Iterable[Content]) -> frozenset[str]:
    """The source tensors that are rounded to a number format."""
    return frozenset(piece.source for content in contents if isinstance(content, Quantized) for piece in content.pieces)
