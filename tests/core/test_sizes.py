"""Fields that take sizes."""

import pytest

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.sizes import Bytes, parse_bits


class Sized(Config):
    memory: Bytes | None = None


@pytest.mark.parametrize(
    ("value", "size"), [(None, None), (500, 500), ("500", 500), ("16GB", 16 * 10**9), ("1.5 MiB", 3 << 19)]
)
def test_numbers_and_text_are_sizes(value: object, size: int | None) -> None:
    assert Sized.parse({"memory": value}, "here").memory == size


@pytest.mark.parametrize("value", [0, "0GB", -1, "1,5TB", "200,000,000", "16-GB", True, "", 1.5, "lots"])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ForgeError, match="here: memory"):
        Sized.parse({"memory": value}, "here")


@pytest.mark.parametrize("text", ["0", "17bits", "100"])
def test_bits_of_a_weight_are_at_most_sixteen(text: str) -> None:
    with pytest.raises(UsageError, match=f"--budget {text}: not between 0 and 16 bits"):
        parse_bits(text, "--budget")
    assert parse_bits("4.5 bits", "--budget") == 4.5
