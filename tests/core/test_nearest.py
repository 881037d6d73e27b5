"""Only names that are close are proposed."""

import pytest

from trtforge.core.nearest import nearest_name

OPTIONS = ("--gpu", "--out", "--quant", "--quiet", "--verbose", "--max-batch-size", "--max-seq-len")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--bogus", None),
        ("--qant", "--quant"),
        ("--gpus", "--gpu"),
        ("--quantization", "--quant"),  # the only name that begins it
        ("--max-batch", "--max-batch-size"),
        ("--seq-len", "--max-seq-len"),
        ("--max", None),  # too short to tell one
        ("--max-", None),
        ("OUT", "--out"),
        ("", None),
    ],
)
def test_the_nearest_name(name: str, expected: str | None) -> None:
    assert nearest_name(name, OPTIONS) == expected
