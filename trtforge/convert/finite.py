"""Checks source weights for NaN and infinity: an error, or a warning if the user allows them."""

import logging
from collections.abc import Iterable

from trtforge.core.errors import ForgeError
from trtforge.formats.finite import first_nonfinite, is_nan
from trtforge.formats.shards import StoredTensor
from trtforge.models.content import Content, Quantized, WeightOnly

_LOG = logging.getLogger(__name__)


class FiniteWeights:
    """Checks every source slab as it is read. Not thread-safe.

    `allowed`: warn instead of raising, except for tensors in `rounded` (quantised ones): a row or block with a
    non-finite weight has no finite scaling factor.
    """

    def __init__(self, *, allowed: bool = False, rounded: Iterable[str] = ()) -> None:
        self._allowed, self._rounded = allowed, frozenset(rounded)
        self._warned: set[str] = set()

    def look(self, stored: StoredTensor, rows: range, columns: range, data: memoryview) -> None:
        """Check `data`: some rows and columns of a matrix. Raises ForgeError naming file, tensor and index."""
        found = first_nonfinite(data, stored.spec.dtype)
        name = stored.spec.name
        if found is None or name in self._warned:
            return
        value = "NaN" if is_nan(data, stored.spec.dtype, found) else "an infinity"
        row, column = rows[found // len(columns)], columns[found % len(columns)]
        index = f"[{row}]" if len(stored.spec.shape) == 1 else f"[{row}, {column}]"
        message = f"{stored.file}: {name} holds {value} at {index}"
        if not self._allowed:
            raise ForgeError(
                message,
                hint="Download the checkpoint again, or convert it as it is with --allow-nonfinite "
                "(model.allow_nonfinite in a recipe).",
            )
        if name in self._rounded:
            raise ForgeError(
                f"{message}, and non-finite weights cannot be quantised",
                hint="Leave the layer unquantised with --exclude-module, or download the checkpoint again.",
            )
        self._warned.add(name)
        _LOG.warning("%s: converted as it is (--allow-nonfinite)", message)


def rounded_sources(contents: Iterable[Content]) -> frozenset[str]:
    """Names of the source tensors that are quantised."""
    quantized = (content for content in contents if isinstance(content, Quantized | WeightOnly))
    return frozenset(piece.source for content in quantized for piece in content.pieces)
