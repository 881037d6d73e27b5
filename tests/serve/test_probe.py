"""The probes against a server that answers as it is told."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.ports import free_ports
from trtforge.cli.app import app
from trtforge.core.errors import ForgeError
from trtforge.serve.probe import Probe, is_serving, probe
from trtforge.serve.request import Unavailable, refused


class Server(ThreadingHTTPServer):
    """Health is fine; `answer` is the status and the text of generate, None for silence."""

    daemon_threads = True
    block_on_close = False
    answer: tuple[int, str] | None = (200, '{"text_output": ""}')
    asked: list[dict[str, object]]
    key: str | None = None
    done: threading.Event

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, "")

    def do_POST(self) -> None:
        self.server.key = self.headers["x-api-key"]
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.answer is None:
            self.server.done.wait(30)
            return
        self._send(*self.server.answer)

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def served() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.asked, server.done = [], threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.done.set()
    server.shutdown()
    server.server_close()


def test_live_sends_a_ping_that_generates_nothing(served: Server) -> None:
    probe("live", served.url)
    assert served.asked == [{"text_input": "", "max_tokens": 1, "trtforge_ping": True}]


def test_the_command_takes_the_url_of_a_container_probe(served: Server) -> None:
    done = CliRunner().invoke(app, ["probe", "live", "--url", f"http://{served.url}/"])
    assert (done.exit_code, done.stdout) == (0, "live: ok\n")
    assert len(served.asked) == 1


def test_startup_asks_for_health_only(served: Server) -> None:
    probe("startup", served.url)
    assert served.asked == []


def test_a_repository_that_does_not_know_pings_is_live(served: Server) -> None:
    served.answer = (400, '{"error": "the prompt is empty"}')
    probe("live", served.url)


def test_a_wedge_fails_within_the_timeout(served: Server) -> None:
    served.answer = None
    with pytest.raises(ForgeError, match=r"did not answer POST /v2/models/ensemble/generate within 0\.\d s") as caught:
        probe("live", served.url, timeout=0.5)
    assert "stacks" in caught.value.hint


def test_an_engine_that_ended_is_not_live(served: Server) -> None:
    served.answer = (503, '{"error": "UNAVAILABLE: the engine ended: rank 1 ended"}')
    with pytest.raises(ForgeError, match=r"does not serve: .*rank 1 ended"):
        probe("live", served.url)


def test_an_unknown_model_is_named(served: Server) -> None:
    served.answer = (400, '{"error": "Request for unknown model: \'ensemble\' is not found"}')
    with pytest.raises(ForgeError, match="has no model ensemble") as caught:
        probe("live", served.url)
    assert "--model" in caught.value.hint


@pytest.mark.parametrize("kind", ["live", "ready"])
def test_a_server_that_is_stopping_is_told_from_an_unknown_model(served: Server, kind: Probe) -> None:
    served.answer = (400, '{"error": "Request for unknown model: \'ensemble\' has no available versions"}')
    with pytest.raises(Unavailable) as caught:
        probe(kind, served.url)
    assert caught.value.message == "the server does not serve ensemble now: it is stopping, or the model is not loaded"
    assert "--model" not in caught.value.hint


@pytest.mark.parametrize("kind", ["live", "ready"])
def test_the_key_comes_from_the_environment(served: Server, kind: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTFORGE_API_KEY", raising=False)
    served.answer = (401, '{"error": "an API key is required: send the header Authorization: Bearer KEY"}')
    with pytest.raises(ForgeError, match=f"the server at {served.url} requires an API key") as caught:
        probe(kind, served.url)
    assert caught.value.hint.startswith("Set it with `export TRTFORGE_API_KEY=KEY`")
    assert served.key is None
    monkeypatch.setenv("TRTFORGE_API_KEY", "mine")
    with pytest.raises(ForgeError, match="does not know the API key in TRTFORGE_API_KEY") as caught:
        probe(kind, served.url)
    assert "--api-key-file" in caught.value.hint
    assert served.key == "mine"


@pytest.mark.parametrize("kind", ["startup", "live", "ready"])
def test_nobody_there_is_said(kind: str) -> None:
    with pytest.raises(ForgeError, match="no server answers at"):
        probe(kind, f"127.0.0.1:{free_ports(1)[0]}", timeout=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["nobody", "127.0.0.1:x", "127.0.0.1:99999", "unix:/nowhere", "a b:1"])
def test_an_address_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(ForgeError, match="no server answers at"):
        probe("live", url, timeout=2)


def test_a_port_beyond_the_last_is_not_taken_for_another_one() -> None:
    """Of 65,536 and a port, the resolver keeps the port: a server there would have answered, or let the probe wait."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = 65536 + listening.getsockname()[1]
        with pytest.raises(ForgeError, match=f"no server answers at 127.0.0.1:{port}: port {port} does not exist"):
            probe("live", f"127.0.0.1:{port}", timeout=2)


def test_a_unix_socket_is_asked_like_a_port(tmp_path: Path) -> None:
    class UnixServer(Server):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)
            self.server_name, self.server_port = "localhost", 0

    class UnixHandler(Handler):
        def address_string(self) -> str:
            return "unix"

    server = UnixServer(str(tmp_path / "s"), UnixHandler)  # type: ignore[arg-type]
    server.asked, server.done = [], threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    probe("live", f"unix:{tmp_path / 's'}")
    assert len(server.asked) == 1
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("message", "serves"),
    [("UNAVAILABLE: the engine is not loaded yet; retry in 2 s", False), ("INTERNAL: broken", None)],
)
def test_a_model_that_has_no_engine_yet_is_not_ready(
    served: Server, monkeypatch: pytest.MonkeyPatch, message: str, serves: bool | None
) -> None:
    def generate(*_: object, **__: object) -> None:
        raise refused(message)

    monkeypatch.setattr("trtforge.serve.probe.generate", generate)
    if serves is None:
        with pytest.raises(ForgeError, match=message):
            is_serving(served.url, "127.0.0.1:1", "ensemble", 5.0)
    else:
        assert is_serving(served.url, "127.0.0.1:1", "ensemble", 5.0) is serves
