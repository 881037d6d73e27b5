"""The address and protocol of a command line, and ports that speak another protocol than asked for."""

import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest

from tests.patience import PATIENCE
from trtforge.cli.gateway import _listens, _warn_of
from trtforge.core.errors import ForgeError, UsageError
from trtforge.gateway.config import GatewayConfig
from trtforge.serve.client import Protocol, Sampling, generate
from trtforge.serve.endpoint import Endpoint
from trtforge.serve.probe import probe
from trtforge.serve.spoken import spoken


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [
        (None, None, ("127.0.0.1:8001", "grpc")),
        (None, "grpc", ("127.0.0.1:8001", "grpc")),
        (None, "http", ("127.0.0.1:8000", "http")),
        ("gpu7:9001", None, ("gpu7:9001", "grpc")),
        ("gpu7:9000", "http", ("gpu7:9000", "http")),
        ("gpu7", None, ("gpu7:8001", "grpc")),
        ("gpu7", "http", ("gpu7:8000", "http")),
        ("http://gpu7:9000/", None, ("gpu7:9000", "http")),
        ("http://gpu7", "http", ("gpu7:8000", "http")),
        ("grpc://gpu7:9001", None, ("gpu7:9001", "grpc")),
        ("[::1]:9001", None, ("[::1]:9001", "grpc")),
        ("[::1]", None, ("[::1]:8001", "grpc")),
        ("unix:/run/x.sock", None, ("unix:/run/x.sock", "grpc")),
    ],
)
def test_the_address_follows_the_protocol(url: str | None, protocol: str | None, expected: tuple[str, str]) -> None:
    found = Endpoint.of(url, protocol)
    assert (found.url, found.protocol) == expected


@pytest.mark.parametrize(
    ("url", "protocol", "said"),
    [
        (None, "https", "--protocol https: neither grpc nor http"),
        ("https://gpu7:9000", None, "without TLS"),
        ("http://gpu7:9000", "grpc", "--url http://gpu7:9000 with --protocol grpc"),
        ("gpu7:port", None, "not the address of a server"),
        ("", None, "not the address of a server"),
    ],
)
def test_what_is_no_address_is_wrong_usage(url: str | None, protocol: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Endpoint.of(url, protocol)


def test_a_command_that_speaks_grpc_only_names_no_option_that_it_does_not_have() -> None:
    assert Endpoint.of_grpc("grpc://gpu7") == Endpoint("gpu7:8001", "grpc")
    with pytest.raises(UsageError, match="http://gpu7:9000: this command speaks gRPC, not HTTP") as caught:
        Endpoint.of_grpc("http://gpu7:9000")
    assert caught.value.hint == "Give the address of the server's gRPC endpoint as HOST:PORT (port 8001 by default)."


def test_a_command_that_speaks_http_only_takes_a_url_too() -> None:
    assert Endpoint.of_http("http://gpu7:9000/") == Endpoint("gpu7:9000", "http")
    assert Endpoint.of_http("gpu7") == Endpoint("gpu7:8000", "http")
    with pytest.raises(UsageError, match="grpc://gpu7:9001: this command speaks HTTP, not gRPC") as caught:
        Endpoint.of_http("grpc://gpu7:9001")
    assert caught.value.hint == "Give the address of the server's HTTP endpoint as HOST:PORT (port 8000 by default)."


class _Http(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def http_only() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Http)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def grpc_only() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def mute() -> Iterator[str]:
    """Accepts connections and closes them."""
    server = socket.create_server(("127.0.0.1", 0))

    def close_all() -> None:
        with suppress(OSError):
            while True:
                server.accept()[0].close()

    threading.Thread(target=close_all, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.close()


def test_what_a_port_speaks(http_only: str, grpc_only: str, mute: str) -> None:
    assert (spoken(http_only), spoken(grpc_only), spoken(mute), spoken("127.0.0.1:1")) == ("http", "grpc", None, None)


def test_a_gateway_warns_of_backends_that_do_not_speak_grpc(
    http_only: str, grpc_only: str, mute: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _warn_of([grpc_only, http_only, mute, "127.0.0.1:1"], "--backend", "requests are refused")
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {http_only} speaks HTTP, not gRPC: give --backend its gRPC port (8001 by default)",
        *(
            f"warning: no gRPC server answers at {each}: requests are refused until one does"
            for each in (mute, "127.0.0.1:1")
        ),
    ]


def test_a_gateway_serves_without_the_servers_for_contexts_and_says_so(
    mute: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = [threading.Event(), threading.Event()]
    monkeypatch.setattr("trtforge.cli.gateway._warn_of", lambda *given: (warn(*given), started.pop().set()))
    warn, waits = _warn_of, list(started)
    _listens(GatewayConfig(backends=("127.0.0.1:1",), context_backends=(mute,)))
    assert all(each.wait(PATIENCE) for each in waits)
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(
        [
            "warning: no gRPC server answers at 127.0.0.1:1: requests are refused until one does",
            f"warning: no gRPC server answers at {mute}: those of --backend compute prompts too until one does",
        ]
    )


@pytest.mark.parametrize("finish_reason", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_other_protocol_is_named(http_only: str, grpc_only: str, stream: bool, finish_reason: bool) -> None:
    cases: list[tuple[str, Protocol, str, str]] = [
        (grpc_only, "http", "speaks gRPC, not HTTP", "HTTP port (8000 by default)"),
        (http_only, "grpc", "speaks HTTP, not gRPC", "gRPC port (8001 by default)"),
    ]
    other = {"http": "grpc", "grpc": "http"}
    sampling = Sampling(finish_reason=finish_reason)
    for url, protocol, said, hint in cases:
        with pytest.raises(ForgeError) as caught:
            generate(url, "ensemble", "a", sampling, protocol=protocol, stream=stream)
        assert caught.value.message == f"{url} {said}"
        assert caught.value.hint == f"Give the {hint}; `trtforge infer` also takes --protocol {other[protocol]}."


def test_a_probe_of_the_grpc_port_says_so(grpc_only: str) -> None:
    with pytest.raises(ForgeError, match=f"{grpc_only} speaks gRPC, not HTTP") as caught:
        probe("live", grpc_only)
    assert "port 8000" in caught.value.hint
