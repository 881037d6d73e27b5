"""Only names that are close are proposed."""

from pathlib import Path

import pytest

from trtforge.core.nearest import nearest_name, no_directory

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


def test_what_is_no_directory_is_told_from_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "log").touch()
    assert no_directory(tmp_path / "log", otherwise="Give it.").message == f"{tmp_path}/log is not a directory"
    error = no_directory(tmp_path / "engin", otherwise="Give it.")
    assert (error.message, error.hint) == (f"{tmp_path}/engin: no such directory", f"Did you mean {tmp_path}/engine?")
