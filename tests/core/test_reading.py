"""Errors of reading name the file, and the disk where that failed."""

import errno
from pathlib import Path

import pytest

from trtforge.core.digest import file_digest
from trtforge.core.errors import ForgeError
from trtforge.core.reading import naming, read_limited

FAILING = Path("/proc/self/mem")
"""A regular file whose first bytes give EIO."""


def test_a_disk_that_fails_is_named_as_the_cause() -> None:
    with pytest.raises(ForgeError) as caught:
        read_limited(FAILING, 100, hint="Download it again.", absent="There is none.")
    assert caught.value.message == f"{FAILING}: Input/output error"
    assert caught.value.hint == "Check the disk or network share that it is on."


def test_a_digest_names_the_file_that_cannot_be_read() -> None:
    with pytest.raises(OSError, match="Input/output error") as caught:
        file_digest(FAILING)
    assert caught.value.filename == str(FAILING)


def test_an_error_that_names_a_file_keeps_it() -> None:
    with pytest.raises(PermissionError) as caught, naming(Path("outer")):
        raise OSError(errno.EACCES, "no", "inner")
    assert caught.value.filename == "inner"
