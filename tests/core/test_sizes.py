"""Fields that take sizes."""

import pytest

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.sizes import Bytes, parse_bits


class Sized(Config):
    memory: Bytes | None = None


@pytest.mark.parametrize(
    ("value", "size"),
    [(None, None), (500, 500), ("500", 500), ("16GB", 16 * 10**9), ("1.5 MiB", 3 << 19), (str(2**53 + 1), 2**53 + 1)],
)
def test_numbers_and_text_are_sizes(value: object, size: int | None) -> None:
    assert Sized.parse({"memory": value}, "here").memory == size


@pytest.mark.parametrize("value", [2**63, str(2**63), "10000000TB", "9" * 400, 10**400])
def test_what_no_64_bit_integer_holds_is_refused(value: object) -> None:
    with pytest.raises(ForgeError, match="here: memory: Input should be less than or equal to 9223372036854775807"):
        Sized.parse({"memory": value}, "here")
    assert Sized.parse({"memory": str(2**63 - 1)}, "here").memory == 2**63 - 1


@pytest.mark.parametrize("value", [0, "0GB", -1, "1,5TB", "200,000,000", "16-GB", True, "", 1.5, "lots"])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ForgeError, match="here: memory"):
        Sized.parse({"memory": value}, "here")


@pytest.mark.parametrize("text", ["0", "17bits", "100"])
def test_bits_of_a_weight_are_at_most_sixteen(text: str) -> None:
    with pytest.raises(UsageError, match=f"--budget {text}: not between 0 and 16 bits"):
        parse_bits(text, "--budget")
    assert parse_bits("4.5 bits", "--budget") == 4.5
