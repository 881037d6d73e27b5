"""INT4 weight-only: which part of a row TensorRT-LLM's build sees on a rank, when it finds the row's scale.

The build takes the largest magnitude of a rank's part of an output / 8 as its scale. So each rank's part has to hold a
code at the end of the range, if the scale that the codes were found with is to be found again.
"""

MOST_PARTS = 8
"""Ranks that the inputs of a row-parallel linear can be split over, with codes of a calibration."""
_LEAST_WIDTH = 64  # inputs of a part: each part has a code at the end of the range, which costs little if it has many


def row_parts(inputs: int) -> int:
    """The parts of a row-parallel linear's `inputs`, each of which has such a code in every row."""
    parts = MOST_PARTS
    while parts > 1 and (inputs % parts or inputs // parts < _LEAST_WIDTH):
        parts //= 2
    return parts


def holds_part(columns: range, inputs: int) -> bool:
    """Whether a rank's `columns` of a row-parallel linear include a whole part."""
    width = inputs // row_parts(inputs)
    return -(-columns.start // width) < columns.stop // width
