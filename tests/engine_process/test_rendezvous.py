"""The socket of an engine process, whatever its model is called."""

import os
from pathlib import Path

import pytest

from trtforge.core.errors import ForgeError
from trtforge.engine_process.rendezvous import RUNTIME_VARIABLE, socket_file, socket_path


def test_long_names_have_short_sockets_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Path("/tmp/trtforge-0123456789")
    monkeypatch.setenv(RUNTIME_VARIABLE, str(runtime))
    assert socket_path("tensorrt_llm", 7) == runtime / "tensorrt_llm.sock"
    names = [f"{'a' * 88}{number}-tensorrt_llm" for number in range(2)]
    paths = [socket_path(name, 7) for name in names]
    assert len(set(paths)) == 2
    assert all(path.parent == runtime and len(os.fsencode(path)) <= 107 for path in paths)
    assert paths == [socket_file(runtime, name) for name in names]


def test_a_directory_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, f"/tmp/{'r' * 100}")
    with pytest.raises(ForgeError, match=r"the socket path .* has 127 bytes, the limit is 107"):
        socket_path("a-model-of-some-name", 7)
