"""The programs that run in NVIDIA's image: they wait for requests, and tell a server that does not generate."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trtforge.core.api_keys import KEY_VARIABLE, read_key_file
from trtforge.deploy.probes import drain_command, embedded_probes, triton_probes

ITERATIONS = 'nv_trt_llm_general_metrics{{general_type="iteration_counter",model="m",version="1"}} {}\n'
LINES = 'nv_trt_llm_request_metrics{{model="m",request_type="{}",version="1"}} {}\n'


@contextmanager
def answering(*bodies: str, status: int = 200, late: bool = False) -> Iterator[tuple[int, list[str]]]:
    """A server that gives these answers in turn, the last one again and again; its port, and what was asked.

    `late`: it answers no POST in time.
    """
    asked: list[str] = []
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(self.path)
            if late and self.command == "POST":
                ended.wait()
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(bodies[min(len(asked), len(bodies)) - 1].encode())

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, asked
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def run(program: str) -> int:
    quick = program.replace("time.sleep(5)", "pass").replace("time.sleep(1)", "time.sleep(0.01)")
    quick = quick.replace("timeout=15", "timeout=0.1")
    return subprocess.run([sys.executable, "-c", quick], stderr=subprocess.DEVNULL, check=False).returncode


@pytest.mark.parametrize("busy", ["active", "waiting"])
def test_a_drain_waits_until_no_request_runs_or_waits(busy: str) -> None:
    idle = LINES.format("active", 0) + LINES.format("waiting", 0) + LINES.format("max", 64)
    one = idle.replace(LINES.format(busy, 0), LINES.format(busy, 1))
    with answering(one, one, idle) as (port, asked):
        assert run(drain_command(port, 30)[2]) == 0
        assert asked == ["/metrics"] * 3


def test_a_drain_ends_with_its_time() -> None:
    with answering(LINES.format("active", 1)) as (port, asked):
        assert run(drain_command(port, -4)[2]) == 0  # a second in all: 5 before requests end, and 4 less
        assert len(asked) > 1


@pytest.mark.parametrize(("status", "code"), [(200, 0), (400, 1), (503, 1)])
def test_a_server_that_generates_nothing_is_not_ready(status: int, code: int) -> None:
    with answering('{"text_output": "a"}', status=status) as (port, asked):
        assert run(triton_probes("ensemble", port, port).ready[2]) == code
        assert asked == ["/metrics", "/v2/models/ensemble/generate"]


@pytest.mark.parametrize(
    "text", ["UNAVAILABLE: the queue is full: 64 sequences run or wait; retry in 5 s", "Exceeds maximum queue size"]
)
def test_a_server_with_a_full_queue_stays_ready(text: str) -> None:
    with answering(f'{{"error": "{text}"}}', status=503) as (port, asked):
        assert run(triton_probes("ensemble", port, port).ready[2]) == 0
        assert asked == ["/metrics", "/v2/models/ensemble/generate"]


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [(ITERATIONS.format(7), ITERATIONS.format(9), 0), (ITERATIONS.format(7), ITERATIONS.format(7), 1), ("", "", 1)],
)
def test_a_server_whose_engine_goes_on_stays_ready_with_a_long_queue(before: str, after: str, code: int) -> None:
    bodies = (LINES.format("active", 4) + before, "", LINES.format("active", 4) + after)
    with answering(*bodies, late=True) as (port, asked):
        assert run(triton_probes("ensemble", port, port).ready[2]) == code
        assert asked == ["/metrics", "/v2/models/ensemble/generate", "/metrics"]


@pytest.mark.parametrize("end", ["\n", "\r\n", " \t\n"])
def test_the_probe_sends_the_first_key_of_the_file_as_the_server_reads_it(end: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(
        end.join(["", "# of the team", "  # old", "  the-first-key-of-all", "the-second-key-of-all", ""]).encode()
    )
    shell, option, script = embedded_probes("ensemble", 8000, file).ready
    said = script.replace("exec trtforge", f'printf %s "${KEY_VARIABLE}" #')
    found = subprocess.run([shell, option, said], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert found == read_key_file(file)[0] == "the-first-key-of-all"
