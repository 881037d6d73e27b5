"""What clients and probes say when there is no server, or one that is not ours."""

import json
import threading
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest

from tests.ports import free_ports
from trtforge.core.errors import ForgeError
from trtforge.serve.client import Protocol, Sampling, generate, stream_text
from trtforge.serve.grpc_client import GrpcClient
from trtforge.serve.probe import probe
from trtforge.serve.request import Chat


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


class Keyed(BaseHTTPRequestHandler):
    """A server with API keys that got none of them."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("stream", [True, False])
def test_a_missing_key_is_named_by_its_variable(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTFORGE_API_KEY", raising=False)
    server = HTTPServer(("127.0.0.1", 0), Keyed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"127.0.0.1:{server.server_port}"
    with pytest.raises(ForgeError, match=f"the server at {url} requires an API key") as caught:
        generate(url, "ensemble", "a", Sampling(finish_reason=True), protocol="http", stream=stream)
    assert caught.value.hint.startswith("Set it with `export TRTFORGE_API_KEY=KEY`")
    server.shutdown()
    server.server_close()


def test_a_server_that_wants_a_key_over_grpc_is_told_apart() -> None:
    class Refusing(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.stream_stream_rpc_method_handler(
                lambda messages, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")
            )

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(Refusing(),))
    url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with pytest.raises(ForgeError, match="requires a key over gRPC, where trtforge sends none") as caught:
        generate(url, "ensemble", "a", Sampling(), stream=True)
    assert "--protocol http`, which sends the key in TRTFORGE_API_KEY" in caught.value.hint
    server.stop(None)


def test_chat_messages_without_a_template_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrpcClient, "inputs", lambda self, model: frozenset({"text_input", "return_finish_reason"}))
    chat = Chat([{"role": "user", "content": "a"}])
    with pytest.raises(
        ForgeError, match="ensemble does not accept chat messages: the served tokenizer has no chat"
    ) as caught:
        generate("127.0.0.1:1", "ensemble", chat, Sampling(finish_reason=True))
    assert caught.value.hint.startswith("Leave out --chat to complete the prompt as it is")


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
