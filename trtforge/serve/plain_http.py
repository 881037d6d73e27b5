"""A small HTTP request over TCP or a Unix socket, for probes, which must be cheap."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import BadStatusLine, HTTPConnection, HTTPException, RemoteDisconnected

from trtforge.core.api_keys import key_header
from trtforge.core.defaults import HTTP_PORT
from trtforge.core.errors import ForgeError
from trtforge.serve.address import Address
from trtforge.serve.spoken import spoken

_LONGEST = 1 << 16  # bytes of an answer that are read
_HTTP_HINT = f"Give the address of its HTTP endpoint (port {HTTP_PORT} by default)."


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; `text` may be truncated."""

    status: int
    text: str


class NoAnswer(ForgeError):
    """No answer came. `late`: the server had accepted the request."""

    def __init__(self, message: str, *, hint: str, late: bool) -> None:
        super().__init__(message, hint=hint)
        self.late = late


def get(address: str, path: str, timeout: float, *, longest: int = _LONGEST, keyed: bool = False) -> Answer:
    """GET `path` at `address`: HOST:PORT or unix:PATH. `timeout`: seconds without any data. Raises NoAnswer.

    `longest`: bytes of the answer that are read; `keyed`: with the API key if TRTFORGE_API_KEY is set.
    """
    return _exchange(address, "GET", path, None, timeout, longest, keyed=keyed)


def post(address: str, path: str, values: Mapping[str, object], timeout: float) -> Answer:
    """POST `values` as JSON, with the API key if TRTFORGE_API_KEY is set; otherwise like `get`."""
    return _exchange(address, "POST", path, json.dumps(values).encode(), timeout, _LONGEST, keyed=True)


def _exchange(
    address: str, method: str, path: str, body: bytes | None, timeout: float, longest: int, *, keyed: bool
) -> Answer:
    hint = "Look at the server's log; `trtforge serve` shows the stacks of a server that hangs."
    try:
        connection = _connection(address, timeout)
        try:
            headers = ({"Content-Type": "application/json"} if body else {}) | (key_header() if keyed else {})
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.read(longest).decode(errors="replace"))
        finally:
            connection.close()
    except TimeoutError:
        message = f"the server at {address} did not answer {method} {path} within {timeout:.1f} s"
        raise NoAnswer(message, hint=hint, late=True) from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPException | ConnectionResetError) and spoken(address) == "grpc":
            raise NoAnswer(f"{address} speaks gRPC, not HTTP", hint=_HTTP_HINT, late=False) from None
        if isinstance(error, BadStatusLine) and not isinstance(error, RemoteDisconnected):
            raise NoAnswer(f"what answers at {address} does not speak HTTP", hint=_HTTP_HINT, late=False) from None
        message = f"no server answers at {address}: {error or type(error).__name__}"
        raise NoAnswer(message, hint="Start one with `trtforge serve REPO`.", late=False) from None


def _connection(address: str, timeout: float) -> HTTPConnection:
    parsed = Address.parse(address)
    if parsed.path is not None:
        return _UnixConnection(parsed.path, timeout)
    return HTTPConnection(parsed.host, parsed.port, timeout=timeout)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
