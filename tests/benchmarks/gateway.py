"""What the gateway adds to a request: latency and requests a second, beside a bare FastAPI proxy.

Behind both is a KServe server without a model (`tests.gateway.kserve_server`), whose answers are ready at once; all
four programs share the machine, so requests a second are those of the whole set-up.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx

from tests.benchmarks.http_load import MAX_TOKENS
from tests.ports import free_ports

ALONE, BUSY = 300, 2000
CONNECTIONS = 32


@dataclass(frozen=True)
class Measured:
    """One way. `p50`: seconds of a request alone, the median; `rate`: requests a second of CONNECTIONS at once."""

    p50: float
    rate: float


@dataclass(frozen=True)
class Gateway:
    """Medians of all runs. `events`: streamed events a second of CONNECTIONS at once."""

    gateway: Measured
    proxy: Measured
    events: float

    @property
    def overhead(self) -> float:
        """Seconds that the gateway takes longer than the bare proxy."""
        return self.gateway.p50 - self.proxy.p50


def measure(runs: int) -> Gateway:
    """Both ways `runs` times in turns, after a warm-up."""
    taken: dict[str, list[Measured]] = {"gateway": [], "proxy": []}
    events = []
    with ExitStack() as stack:
        backend = stack.enter_context(_backend())
        ports = dict(zip(taken, free_ports(2), strict=True))
        commands = {
            "gateway": ("trtforge.gateway", f"--backend={backend}", "--host=127.0.0.1", f"--port={ports['gateway']}",
                        "--model=ensemble", "--drain-timeout=1"),
            "proxy": ("tests.benchmarks.bare_proxy", backend, str(ports["proxy"])),
        }  # fmt: skip
        for name, command in commands.items():
            stack.enter_context(_program(command, ports[name]))
            _load(ports[name], 1, 50)
        for _ in range(runs):
            for name, port in ports.items():
                alone, busy = _load(port, 1, ALONE), _load(port, CONNECTIONS, BUSY)
                taken[name].append(Measured(statistics.median(alone[1]), BUSY / busy[0]))
            seconds, _ = _load(ports["gateway"], CONNECTIONS, BUSY // 4, stream=True)
            events.append(BUSY // 4 * MAX_TOKENS / seconds)
    return Gateway(*(_median(taken[name]) for name in ("gateway", "proxy")), statistics.median(events))


def _median(found: Sequence[Measured]) -> Measured:
    return Measured(statistics.median(run.p50 for run in found), statistics.median(run.rate for run in found))


def _load(port: int, connections: int, requests: int, *, stream: bool = False) -> tuple[float, list[float]]:
    """Seconds of all requests together, and of each."""
    numbers = (str(port), str(connections), str(requests), str(stream).lower())
    command = (sys.executable, "-m", "tests.benchmarks.http_load", *numbers)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return found["seconds"], found["taken"]


@contextmanager
def _backend() -> Iterator[str]:
    """The address of the server behind; it ends when its standard input closes."""
    command = (sys.executable, "-m", "tests.gateway.kserve_server", str(MAX_TOKENS))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        yield program.stdout.readline().strip()
        program.kill()


@contextmanager
def _program(module: Sequence[str], port: int) -> Iterator[None]:
    """A program that listens meanwhile."""
    with subprocess.Popen((sys.executable, "-m", *module), stderr=subprocess.DEVNULL) as program:
        until = time.monotonic() + 30
        while program.poll() is None and time.monotonic() < until:
            try:
                httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield
        program.kill()
