"""Combines the formats of a source's linear layers into one description of a mixed-precision checkpoint."""

from collections.abc import Sequence
from dataclasses import replace

from trtforge.formats.quantization_values import ORIGINAL, Values
from trtforge.formats.quantized_source import QuantizedSource, StoredFormat

_EVERYWHERE: StoredFormat = "fp8"
"""The format that may be combined with one other in a checkpoint; the embedded engine has kernels for the pair."""


def mixed_source(values: Values, groups: Sequence[QuantizedSource]) -> QuantizedSource:
    """The description of all groups of modules, FP8 last. `values`: their description, for errors.

    Raises ForgeError for no groups, for two formats besides FP8, and for different group sizes.
    """
    if not groups:
        raise values.refusal("no layer is quantised")
    first, *others = sorted(groups, key=lambda group: group.format == _EVERYWHERE)
    found = replace(first, others=tuple(others))
    beside = [name for name in found.formats if name != _EVERYWHERE]
    if len(beside) > 1:
        raise values.refusal(
            f"layers in {', '.join(found.formats)}: a checkpoint has one format, or one beside {_EVERYWHERE}",
            f"Quantise with {beside[0]} and {_EVERYWHERE} alone, or c{ORIGINAL[1:]}",
        )
    sizes = sorted({group.group_size for group in groups if group.format == found.format})
    if len(sizes) > 1:
        raise values.refusal(f"{found.format} layers have groups of {sizes[0]} and {sizes[1]} inputs, not of one size")
    return found
