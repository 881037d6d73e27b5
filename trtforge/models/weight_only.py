"""INT4 weight-only: the part of a row from which TensorRT-LLM's build computes the row's scale on a rank.

The build takes the largest magnitude of a rank's part of an output / 8 as its scale. So each rank's part needs a code
at an end of the range for the build to find the scale of the codes again.
"""

MOST_PARTS = 8
"""The most ranks over which the inputs of a row-parallel linear with a calibration's codes can be split."""
_LEAST_WIDTH = 64  # inputs of a part: the end code of each part costs little accuracy if it has many


def row_parts(inputs: int) -> int:
    """The number of parts of a row-parallel linear's `inputs`; each part has an end code in every row."""
    parts = MOST_PARTS
    while parts > 1 and (inputs % parts or inputs // parts < _LEAST_WIDTH):
        parts //= 2
    return parts


def holds_part(columns: range, inputs: int) -> bool:
    """Whether a rank's `columns` of a row-parallel linear include a whole part."""
    width = inputs // row_parts(inputs)
    return -(-columns.start // width) < columns.stop // width
