"""`trtforge serve` as users start it: on free ports, in a temporary directory of its own, with every wait bounded."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from tests.assault.tree import Tree
from tests.ports import free_ports
from trtforge.machine.processes import end_with_parent

_SHARED_MEMORY = Path("/dev/shm")
_CACHE = Path(tempfile.gettempdir()) / f"trtforge-{os.getuid()}"
"""Where all servers keep compiled kernels: the same as processes without a cache, so that none compiles its own."""
_OWNER = re.compile(r"(?<![a-z0-9])\d+(?![a-z0-9])")
"""A number that is a word; the first one in the name of shared memory is its owner's process id."""
_GAUGE = re.compile(r"^(nv_trt_llm_\w+)\{(.*)\} (\S+)$", re.MULTILINE)


class AssaultError(Exception):
    """The attack itself cannot go on: a server that does not start, a lone run that fails."""


@dataclass(frozen=True)
class Stopped:
    """How a server ended. `status` None: it had to be killed."""

    seconds: float
    status: int | None
    errors: tuple[str, ...]


@dataclass(frozen=True)
class Gauges:
    """The engine's own figures."""

    active: int
    waiting: int
    used_blocks: int

    @property
    def idle(self) -> bool:
        """Whether no request and no KV block is held."""
        return (self.active, self.waiting, self.used_blocks) == (0, 0, 0)


class Server:
    """A server that was started; `close` ends it and everything that it left."""

    def __init__(self, repository: Path, *options: str) -> None:
        self.repository = repository
        self.ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
        self.directory = Path(tempfile.mkdtemp(prefix="assault-"))
        self.output: list[str] = []
        self.errors: list[str] = []
        self._ready = threading.Event()
        command = [sys.executable, "-m", "trtforge", "serve", str(repository)]
        for name, port in self.ports.items():
            command += [f"--{name}-port", str(port)]
        self.process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": str(self.directory), "TRTFORGE_CACHE": str(_CACHE), "COLUMNS": "200"},
            start_new_session=True,
            # Signals of a dead parent follow the thread that started the child, so only the main thread asks for them.
            preexec_fn=end_with_parent if threading.current_thread() is threading.main_thread() else None,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.output), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()
        self.tree = Tree(self.process.pid)

    @property
    def http(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.ports['http']}"

    @property
    def grpc(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.ports['grpc']}"

    @property
    def running(self) -> bool:
        """Whether `trtforge serve` itself has not ended."""
        return self.process.poll() is None

    def wait_ready(self, seconds: float = 180.0) -> None:
        """Return when it printed that it is ready. Raises AssaultError if it ends or takes longer."""
        until = time.monotonic() + seconds
        while not self._ready.wait(0.1):
            if not self.running or time.monotonic() > until:
                raise AssaultError(f"serve was not ready: status {self.process.poll()}, {self.errors[-5:]}")
        self.tree.sample()

    def gauges(self) -> Gauges | None:
        """The engine's gauges now; None if the metrics port does not answer."""
        try:
            text = httpx.get(f"http://127.0.0.1:{self.ports['metrics']}/metrics", timeout=5, trust_env=False).text
        except httpx.HTTPError:
            return None
        values = {(name, label): float(value) for name, label, value in _GAUGE.findall(text)}

        def value(family: str, kind: str) -> int:
            return int(next((v for (n, label), v in values.items() if n == family and f'"{kind}"' in label), -1))

        requests = "nv_trt_llm_request_metrics"
        used = value("nv_trt_llm_kv_cache_block_metrics", "used")
        return Gauges(value(requests, "active"), value(requests, "waiting"), used)

    def settle(self, seconds: float = 30.0) -> Gauges | None:
        """The gauges once nothing is held any more, or as they are when the time is over."""
        until = time.monotonic() + seconds
        while True:
            now = self.gauges()
            if (now is not None and now.idle) or time.monotonic() > until or not self.running:
                return now
            time.sleep(0.1)

    def wait_end(self, seconds: float) -> Stopped:
        """Wait until it ends by itself. `status` None if it does not in time."""
        start = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)
        if not self.running:
            for reader in self._readers:
                reader.join(timeout=2)
        return Stopped(time.monotonic() - start, self.process.poll(), tuple(self.errors))

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> Stopped:
        """Send a signal and wait."""
        self.tree.sample()
        if self.running:
            self.process.send_signal(number)
        return self.wait_end(seconds)

    def left_over(self, seconds: float = 30.0) -> list[str]:
        """What an ended server left of processes, ports, files and shared memory, once the time is over."""
        until = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def _left(self) -> list[str]:
        processes = [f"process {pid} {name}" for pid, name in self.tree.alive().items()]
        ports = [f"port {name} {port}" for name, port in self.ports.items() if listens(port)]
        known = {pid for pid, _ in self.tree.known} | {self.process.pid}
        shared = [str(path) for path in _SHARED_MEMORY.iterdir() if owner_of(path.name) in known]
        files = [str(path) for path in self.directory.iterdir()]
        return [*processes, *ports, *shared, *files]

    def close(self) -> None:
        """End it, its processes and its files, whatever state it is in."""
        if self.running:
            self.process.send_signal(signal.SIGCONT)
            self.stop(seconds=10)
        until = time.monotonic() + 10
        while (alive := self.tree.alive()) and time.monotonic() < until:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait(timeout=10)
        for path in map(Path, self._left()):
            if path.is_relative_to(_SHARED_MEMORY):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready "):
                self._ready.set()


@contextmanager
def serving(repository: Path, *options: str) -> Iterator[Server]:
    """A server that is ready, closed at the end."""
    server = Server(repository, *options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def owner_of(name: str) -> int | None:
    """The process id in the name of shared memory; None without one. Numbers after it are random, as parts of UUIDs."""
    found = _OWNER.search(name)
    return None if found is None else int(found[0])


def listens(port: int) -> bool:
    """Whether a connection to the port is accepted."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
