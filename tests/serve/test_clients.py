"""What clients and probes say when there is no server, or one that is not ours."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.ports import free_ports
from trtforge.core.errors import ForgeError
from trtforge.serve.client import Protocol, Sampling, generate, stream_text
from trtforge.serve.probe import probe


class Scripted(BaseHTTPRequestHandler):
    """Ready, but every generation breaks after one piece."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith("/live") else 400)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for event in ({"text_output": "one"}, {"error": "the engine ended"}):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("stream", [True, False])
def test_nobody_there(protocol: Protocol, stream: bool) -> None:
    url = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ForgeError, match=f"no server answers at {url}") as caught:
        generate(url, "ensemble", "a", Sampling(), protocol=protocol, stream=stream)
    assert "trtforge serve REPO" in caught.value.hint


def test_probe_of_nobody() -> None:
    url = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ForgeError, match=f"no server answers at {url}"):
        probe("live", url)


def test_probe_of_a_server_that_loads(scripted: str) -> None:
    probe("live", scripted)
    with pytest.raises(ForgeError, match=r"is not ready \(HTTP 400\)"):
        probe("startup", scripted)


def test_error_in_the_middle_of_a_stream_is_raised_there(scripted: str) -> None:
    pieces = stream_text(scripted, "ensemble", "a", Sampling(), protocol="http")
    assert next(pieces) == "one"
    with pytest.raises(ForgeError, match="the server refused the request: the engine ended"):
        next(pieces)
