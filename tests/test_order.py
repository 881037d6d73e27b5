"""The order in which several processes run the tests."""

from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("path", LONGEST)
def test_each_long_file_exists(path: str) -> None:
    assert (ROOT / path).is_file()


def test_no_file_is_named_twice() -> None:
    assert len(set(LONGEST)) == len(LONGEST)
