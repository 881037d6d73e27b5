"""A real Triton server, one for all tests that only ask it while it lives, and the means to start others."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import torch_engine
from tests.patience import PATIENCE
from tests.ports import free_ports
from tests.serve.fake_engine import SLOW_WHILE
from trtforge.core.assets import asset_directory
from trtforge.machine.processes import session_processes
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

_FAKE = Path(__file__).parent / "fake_engine.py"
_MAIN = """
import json
import sys
from pathlib import Path
from trtforge.core.errors import ForgeError
from trtforge.serve.config import ServeConfig
from trtforge.serve.stage import serve
try:
    sys.exit(serve(ServeConfig(**json.loads(sys.argv[2])), Path(sys.argv[1])))
except ForgeError as error:
    print(f"error: {error.message}\\nhint: {error.hint}", file=sys.stderr)
    sys.exit(1)
"""


@dataclass
class Running:
    """`trtforge serve` in a process of its own."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str

    @property
    def ready_line(self) -> str:
        """What it prints when it is ready."""
        return f"ready http={self.http} grpc={self.grpc} metrics={self.metrics}"

    def wait_ready(self) -> None:
        """Return once the line was printed (again); fail with its errors if it ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if line.startswith("openai="):  # of the start before
            line = self.process.stdout.readline().strip()
        if line != self.ready_line:
            pytest.fail(f"{line!r}: {self.process.communicate(timeout=PATIENCE)}")

    def triton(self) -> int:
        """The process id of the Triton server itself."""
        process = self.child("tritonserver")
        assert process is not None, "there is no Triton server"
        return process

    def front(self) -> int:
        """The process id of the HTTP front."""
        process = self.child("trtforge.serve.front")
        assert process is not None, "there is no HTTP front"
        return process

    def child(self, program: str) -> int | None:
        """The process id of a child whose command line has this word."""
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with suppress(OSError):  # one that ends meanwhile
                if program in Path(f"/proc/{child}/cmdline").read_text():
                    return int(child)
        return None

    def model_process(self, model: str) -> int:
        """The process that runs a Python model."""
        for process, program in session_processes(self.triton()).items():
            if program == "triton_python_backend_stub" and f"/{model}/" in Path(f"/proc/{process}/cmdline").read_text():
                return process
        raise AssertionError(f"{model} has no process")

    def end(self) -> int:
        """SIGTERM, and its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE)


class Start(Protocol):
    """Starts a server of a repository, with options of ServeConfig."""

    def __call__(self, repository: Path, **options: object) -> Running: ...


def left_behind(process: int) -> list[str]:
    """What a server of ours would have left: runtime directories and shared memory."""
    places = (Path(os.environ.get("TMPDIR", "/tmp")), Path("/dev/shm"))
    return [str(path) for place in places for path in place.glob(f"trtforge-serve-{process}-*")]


def package_with_fake_engine(directory: Path, config: PackageConfig, files: dict[str, bytes] | None = None) -> Path:
    """A repository whose engine model runs the fake engine; all else is as it ships."""
    templates = directory / "templates"
    shutil.copytree(asset_directory("model_repo_templates"), templates)
    model = templates / "tensorrt_llm" / "1" / "model.py"
    program = 'PROGRAM = ("-m", "trtforge.runtime.hosted")'
    assert program in model.read_text()
    model.write_text(model.read_text().replace(program, f'PROGRAM = ("{_FAKE}",)'))
    engine = torch_engine(directory / "engine", files)
    with patch("trtforge.package.stage.asset_directory", lambda name: templates):
        return package(config, engine, DEMO_MODEL, directory / "repository").path


@pytest.fixture(scope="session")
def fake_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the fake engine."""
    return package_with_fake_engine(tmp_path_factory.mktemp("fake"), PackageConfig())


def start_server(repository: Path, **options: object) -> Running:
    """Start `repository` on free ports; without OpenAI's API unless `openai` says so."""
    ports = free_ports(3)
    named = dict(zip(("http_port", "grpc_port", "metrics_port"), ports, strict=True))
    config = {"ready_timeout": PATIENCE, "drain_timeout": 5, "openai": False, **named, **options}
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, str(repository), json.dumps(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Running(process, *(f"127.0.0.1:{port}" for port in ports))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers that end with the test."""
    started: list[Running] = []

    def run(repository: Path, **options: object) -> Running:
        started.append(start_server(repository, **options))
        return started[-1]

    yield run
    for server in started:
        server.end()


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Servers that this test starts generate slowly until it removes this file: what should be running still runs."""
    path = tmp_path / "slow"
    path.touch()
    monkeypatch.setenv(SLOW_WHILE, str(path))
    return path


@pytest.fixture(scope="session")
def shared() -> Iterator[list[Running]]:
    """The servers that `server` started; the last one may be alive."""
    started: list[Running] = []
    yield started
    for running in started:
        running.end()


@pytest.fixture(scope="module")
def server(fake_repository: Path, shared: list[Running]) -> Running:
    """A server that is ready, for tests that leave it as it was. One that died is replaced for the next module."""
    if not shared or shared[-1].process.poll() is not None or shared[-1].child("tritonserver") is None:
        shared.append(start_server(fake_repository))
        shared[-1].wait_ready()
    return shared[-1]
