"""SIGTERM, SIGINT and SIGHUP of every stage: what was interrupted and is kept, how to go on, and nothing else left."""

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig
from trtforge.machine.processes import session_processes

PROGRAM = """
import importlib, sys, time
from pathlib import Path
begun, place, passes, *words = sys.argv[1:]
module, _, name = place.partition(":")
*owners, last = name.split(".")
owner = importlib.import_module(module)
for part in owners:
    owner = getattr(owner, part)
original, left = getattr(owner, last), int(passes)
def wait(*arguments, **keywords):
    global left
    left -= 1
    if left >= 0:
        return original(*arguments, **keywords)
    Path(begun).touch()
    time.sleep(600)
setattr(owner, last, wait)
sys.argv = ["trtforge", *words]
from trtforge.cli.app import main
main()
"""
SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


@dataclass(frozen=True)
class Ended:
    """A program that a signal ended while it waited in the function at a place."""

    status: int
    stdout: str
    stderr: str


def interrupted(directory: Path, place: str, number: signal.Signals, *words: object, passes: int = 0) -> Ended:
    """`trtforge WORDS` in `directory`, signalled in call number `passes` + 1 of the function at `place`."""
    begun = directory.parent / f"{directory.name}.begun"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(begun), place, str(passes), *map(str, words)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    while not begun.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert session_processes(process.pid) == {}
    begun.unlink()
    return Ended(process.returncode, stdout, stderr)


def left(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("artifacts")
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, base / "checkpoint").path
    engine = compile_engine(EngineConfig(backend="torch"), checkpoint, base / "engine").path
    return {"checkpoint": checkpoint, "engine": engine}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_convert_keeps_the_stages_that_are_complete(here: Path, number: signal.Signals, status: int) -> None:
    words = ["convert", DEMO_MODEL, "out", "--pp", "2", "--dtype", "float32"]
    ended = interrupted(here, "trtforge.convert.writer:_write_stage", number, *words, "--force", passes=1)
    assert (ended.status, ended.stdout) == (status, "")
    again = shlex.join(["trtforge", *map(str, words)])
    kept, said, hint = ended.stderr.splitlines()[-3:]
    assert kept.startswith("warning: out was interrupted: 1 finished file (")
    assert kept.endswith(f" bytes) are kept in {here / '.out.partial'}")
    assert said == f"interrupted by {number.name}: {again} --force"
    assert hint == f"hint: run again: {again}"
    assert left(here) == [".out.partial", ".out.partial/.finished.json", ".out.partial/rank0.safetensors"]

    done = subprocess.run(
        [sys.executable, "-m", "trtforge", *map(str, words)], cwd=here, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "note: resuming an interrupted run" in done.stderr
    assert not (here / ".out.partial").exists()


CALIBRATE = ["--quant", "fp8", "--samples", "2", "--seq-len", "16"]
GATE = ["--samples", "1", "--seq-len", "16"]
STAGES = {
    "calibrate": ("trtforge.calibrate.walk:Walk.run", ["calibrate", DEMO_MODEL, "out", *CALIBRATE]),
    "convert": ("trtforge.convert.writer:_write_stage", ["convert", DEMO_MODEL, "out"]),
    "verify": ("trtforge.verify.stage:_compare", ["verify", "{checkpoint}", "--against", DEMO_MODEL, *GATE]),
    "compile": ("trtforge.compile.torch_engine:build_rank", ["compile", "{checkpoint}", "out", "--backend", "torch"]),
    "package": ("trtforge.package.repository:RepositoryWriter.write", ["package", "{engine}", "out"]),
}


@pytest.mark.parametrize("stage", STAGES)
def test_sigterm_of_a_stage(here: Path, artifacts: dict[str, Path], stage: str) -> None:
    place, words = STAGES[stage]
    command = [str(word).format(**artifacts) for word in words]
    ended = interrupted(here, place, signal.SIGTERM, *command)
    assert ended.status == 143
    assert "Traceback" not in ended.stderr
    again = shlex.join(["trtforge", *command])
    assert f"interrupted by SIGTERM: {again}\n" in ended.stderr
    if stage == "verify":
        assert ended.stderr.endswith(f"hint: verify keeps no intermediate results; run again: {again}\n")
    else:
        assert "warning: out was interrupted before a file was finished; its previous content" in ended.stderr
        assert ended.stderr.endswith(f"hint: run again: {again}\n")
    assert left(here) == []


@pytest.mark.parametrize(("number", "status"), SIGNALS[:2])
def test_a_build_says_which_stage_and_goes_on(here: Path, number: signal.Signals, status: int) -> None:
    words = ["build", "demo-fp32", "--out", "out", "--quiet"]
    ended = interrupted(here, "trtforge.compile.torch_engine:build_rank", number, *words, "--from", "convert", "--set",
                        "gate.samples=1")  # fmt: skip
    assert ended.status == status
    assert "demo-fp32 was interrupted in stage compile; complete and kept: convert, verify\n" in ended.stderr
    command = "trtforge build demo-fp32 --out out --quiet --from convert --set gate.samples=1"
    assert ended.stderr.endswith(f"interrupted by {number.name}: {command}\nhint: run again: {command}\n")
    assert sorted(path.name for path in (here / "out").iterdir()) == [
        "checkpoint", "report.html", "report.json", "report.md", "verification",
    ]  # fmt: skip


def test_a_build_of_which_nothing_is_complete_says_so(here: Path) -> None:
    words = ["build", "demo-fp32", "--out", "out", "--quiet"]
    ended = interrupted(here, "trtforge.convert.writer:_write_stage", signal.SIGINT, *words)
    *_, kept, said, hint = ended.stderr.splitlines()
    assert kept == "warning: the build of demo-fp32 was interrupted in stage convert; no stage is complete"
    command = "trtforge build demo-fp32 --out out --quiet"
    assert (said, hint) == (f"interrupted by SIGINT: {command}", f"hint: run again: {command}")


@pytest.mark.parametrize(("number", "status"), SIGNALS[:1])
def test_a_run_that_builds_says_what_is_kept_and_how_to_go_on(here: Path, number: signal.Signals, status: int) -> None:
    words = ["run", "demo-fp32", "--out", "out", "--quiet", "--set", "gate.samples=1"]
    ended = interrupted(here, "trtforge.compile.torch_engine:build_rank", number, *words)
    assert (ended.status, ended.stdout) == (status, "")
    *_, kept, said, hint = ended.stderr.splitlines()
    assert (
        kept == "warning: the build of demo-fp32 was interrupted in stage compile; complete and kept: convert, verify"
    )
    command = "trtforge run demo-fp32 --out out --quiet --set gate.samples=1"
    assert (said, hint) == (f"interrupted by {number.name}: {command}", f"hint: run again: {command}")


def test_a_run_that_serves_has_nothing_to_go_on_with(here: Path) -> None:
    words = ["run", "demo-fp32", "--out", "out", "--quiet", "--set", "gate.samples=1"]
    ended = interrupted(here, "trtforge.cli.run:talk", signal.SIGINT, *words)
    assert (ended.status, ended.stderr.splitlines()[-1]) == (130, "interrupted")


def test_what_was_there_before_stays(here: Path) -> None:
    convert(ConvertConfig(), DEMO_MODEL, here / "out")
    before = (here / "out/forge.json").read_bytes()
    ended = interrupted(here, "trtforge.convert.writer:_write_stage", signal.SIGTERM, "convert", DEMO_MODEL, "out",
                        "--dtype", "float32")  # fmt: skip
    assert ended.status == 143
    assert (here / "out/forge.json").read_bytes() == before
    assert sorted(path.name for path in here.iterdir()) == ["out"]


def test_other_commands_have_nothing_to_go_on_with(here: Path, artifacts: dict[str, Path]) -> None:
    ended = interrupted(here, "trtforge.runtime.text:generate", signal.SIGTERM, "generate", artifacts["engine"], "The")
    assert ended.status == 143
    assert ended.stderr.endswith(f"interrupted by SIGTERM: trtforge generate {artifacts['engine']} The\n")


LOADING = """
import os, signal, sys
from trtforge.__main__ import main
_, place, *words = sys.argv
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == place:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["trtforge", *words]
main()
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("trtforge.cli", ["version"]),
        ("typer", ["version"]),
        ("trtforge.core.packages", ["version"]),
        ("pydantic", ["recipes", "list"]),
        ("tritonclient.grpc", ["infer", "Hello", "--url", "127.0.0.1:9"]),
        ("numpy", ["infer", "Hello", "--url", "127.0.0.1:9"]),
    ],
)
def test_ctrl_c_while_modules_load_is_one_line(module: str, words: list[str]) -> None:
    command = [sys.executable, "-c", LOADING, module, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (130, "", "interrupted\n")


def test_an_import_that_hides_the_interruption_is_one_line_too() -> None:
    program = (
        "import os, signal, sys, types\n"
        "from trtforge.__main__ import main\n"
        "def run():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        raise ImportError('numpy could not be loaded') from None\n"
        "sys.modules['trtforge.cli.app'] = types.SimpleNamespace(main=run)\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


RUNNING = """
import os, signal, sys, types
from trtforge.__main__ import main
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
def run():
{body}
sys.modules["trtforge.cli.app"] = types.SimpleNamespace(main=run)
main()
"""


def running(body: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The program with `body` as its commands."""
    program = RUNNING.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)


def test_a_bug_after_a_handled_interruption_keeps_its_traceback() -> None:
    done = running("try:\n    interrupt()\nexcept KeyboardInterrupt:\n    pass\nraise ValueError('a bug')")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: a bug\n")


@pytest.mark.parametrize("outcome", ["done = True", "raise ImportError('cannot be loaded')"])
def test_an_import_is_interrupted_at_its_end_and_cleans_up(tmp_path: Path, outcome: str) -> None:
    (tmp_path / "inner.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    import colorsys\n"
        f"except BaseException:\n    raise ImportError('hidden') from None\nprint('inner', flush=True)\n{outcome}\n"
    )
    (tmp_path / "outer.py").write_text("import inner\nprint('outer', flush=True)\n")
    body = "try:\n    import outer\n    print('after')\nfinally:\n    print('cleaned up')"
    done = running(body, tmp_path)
    reached = ["inner", "outer"] if outcome == "done = True" else ["inner"]
    assert (done.returncode, done.stdout.split("\n")) == (130, [*reached, "cleaned up", ""])
    assert done.stderr == "interrupted\n"


def test_a_bar_that_another_thread_draws_does_not_follow_the_message(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import os, signal\nfor _ in 'ab':\n    os.kill(os.getpid(), signal.SIGINT)\n")
    body = (
        "import threading, time\n"
        "drawn = threading.Event()\n"
        "def draw():\n"
        "    while True:\n"
        "        os.write(2, b'a bar\\n')\n"
        "        drawn.set()\n"
        "threading.Thread(target=draw, daemon=True).start()\n"
        "drawn.wait()\n"
        "end = os._exit\n"
        "os._exit = lambda status: (time.sleep(0.2), end(status))\n"
        "import hanging"
    )
    done = running(body, tmp_path)
    assert done.returncode == 130
    lines = done.stderr.splitlines()
    assert lines[-1] == "interrupted"
    assert set(lines[:-1]) == {"a bar"}


def test_a_second_interruption_ends_an_import_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import os, signal, time\nfor _ in 'ab':\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('hangs', flush=True)\ntime.sleep(600)\n"
    )
    done = running("try:\n    import hanging\nfinally:\n    print('cleaned up')", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "hangs\n", "interrupted\n")
