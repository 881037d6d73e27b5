"""Padding of a step's rows to few different numbers, and of the blocks of rows that attention computes together."""

import numpy as np

from trtforge.runtime.scheduling.integers import Ints

_SPLIT_FROM = 48  # saved padding blocks that are worth another attention call in every layer


def padded_rows(rows: int) -> int:
    """`rows` rounded up to 1, 2, 4, 8, multiples of 16 up to 128, of 64 up to 512, or of 256.

    This limits the number of shapes: oneDNN compiles a kernel for each, which takes as long as a step.
    """
    if rows <= 8:
        return 1 << (rows - 1).bit_length() if rows else 0
    unit = 16 if rows <= 128 else 64 if rows <= 512 else 256
    return -(-rows // unit) * unit


def buckets(blocks: Ints, first: int = 0) -> list[tuple[int, int]]:
    """Ranges of rows (with ascending block counts) that are computed together with little padding.

    Splits the rows where this saves most padding blocks, if the saving outweighs another attention call.
    """
    end = first + len(blocks)
    if len(blocks) < 2:
        return [(first, end)] if len(blocks) else []
    saved = np.arange(1, len(blocks)) * (blocks[-1] - blocks[:-1])
    cut = int(saved.argmax()) + 1
    if saved[cut - 1] < _SPLIT_FROM:
        return [(first, end)]
    return [*buckets(blocks[:cut], first), *buckets(blocks[cut:], first + cut)]
