"""API keys: how the file is read, and who is let in."""

from pathlib import Path

import pytest

from trtforge.core.api_keys import readable_by_others
from trtforge.core.errors import ForgeError
from trtforge.serve.front.keys import read_keys
from trtforge.serve.front.refusal import Refusal

ONE, TWO = "first-key-0123456789", "second-key-0123456789"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# clients\n{ONE}\n\n  {TWO}  \n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("key", [ONE, TWO])
def test_each_key_is_accepted_in_both_headers(file: Path, key: str) -> None:
    keys = read_keys(file)
    keys.require({b"authorization": f"Bearer {key}".encode()})
    keys.require({b"authorization": f"bearer  {key}".encode()})
    keys.require({b"x-api-key": key.encode()})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b"Basic Zmlyc3Q="},
        {b"authorization": b"Bearer "},
        {b"authorization": ONE.encode()},
        {b"x-api-key": ONE[:-1].encode()},
        {b"x-api-key": b"# clients"},
        {b"x-api-key": b"\xff\xfe"},
    ],
)
def test_others_are_not(file: Path, headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Refusal) as caught:
        read_keys(file).require(headers)
    assert caught.value.status == 401
    assert caught.value.headers == {"www-authenticate": "Bearer"}
    assert ONE not in caught.value.message


def test_keys_are_not_shown(file: Path) -> None:
    keys = read_keys(file)
    assert ONE not in repr(keys) + repr(vars(keys))


@pytest.mark.parametrize(
    ("text", "said"), [("short\n", "line 1: a key has at least 16"), ("# none\n", "holds no API key")]
)
def test_a_file_without_good_keys_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ForgeError, match=said) as caught:
        read_keys(path)
    assert "openssl rand -hex 32" in caught.value.hint
    assert "short" not in caught.value.message


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_files_that_others_read_are_seen(file: Path) -> None:
    assert not readable_by_others(file)
    file.chmod(0o640)
    assert readable_by_others(file)
