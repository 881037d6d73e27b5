"""An engine process as its parent sees it: one line on standard output, and its end with its standard input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from trtforge.core.errors import ForgeError
from trtforge.engine_process.start import EngineProcess

_ENGINE = """import os
import sys
from pathlib import Path

from tests.engine_process.test_server import ManualEngine
from trtforge.engine_process.admission import QueueLimits
from trtforge.engine_process.host import host


def load():
    print("a line of a library", flush=True)
    os.write(1, b"a line of its C++ code\\n")
    return ManualEngine()


sys.exit(host(load, Path(sys.argv[1]), QueueLimits()))
"""


def test_what_libraries_print_goes_to_standard_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ENGINE, str(tmp_path / "engine.sock")]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ready": True}
    assert done.stderr.splitlines() == ["a line of a library", "a line of its C++ code"]


def test_a_process_that_prints_first_is_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What the interpreter runs before the program, such as sitecustomize, may print to the same pipe."""
    process = EngineProcess(("-c", f"print('{{}}'); print('a notice'); {_ENGINE}", str(tmp_path / "engine.sock")))
    process.end()
    assert capfd.readouterr().err.splitlines()[:2] == ["{}", "a notice"]


@pytest.mark.parametrize("printed", ["", "a notice", "5"])
def test_a_process_that_ends_without_a_reply_is_an_error(printed: str) -> None:
    with pytest.raises(ForgeError, match="the engine process ended with status 3 while loading"):
        EngineProcess(("-c", f"print('{printed}'); raise SystemExit(3)"))


def test_a_process_that_was_killed_is_said_to_have_had_too_little_memory() -> None:
    with pytest.raises(ForgeError, match="the engine process was killed, probably because memory ran out"):
        EngineProcess(("-c", "import os; os.kill(os.getpid(), 9)"))


def test_memory_that_runs_out_while_loading_is_told_to_the_parent(tmp_path: Path) -> None:
    engine = _ENGINE.replace("return ManualEngine()", "raise MemoryError")
    with pytest.raises(ForgeError, match="there is not enough memory") as raised:
        EngineProcess(("-c", engine, str(tmp_path / "engine.sock")))
    assert str(raised.value.hint).startswith("Give it more")
