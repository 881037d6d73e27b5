"""Detects a port's protocol after a failed request: HTTP/1 and gRPC (HTTP/2) have separate ports."""

import socket
from contextlib import suppress
from typing import Literal

from trtforge.core.defaults import GRPC_PORT, HTTP_PORT
from trtforge.core.errors import ForgeError
from trtforge.serve.address import Address

Protocol = Literal["grpc", "http"]

_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""
_HTTP1 = b"GET /v2/health/live HTTP/1.0\r\n\r\n"
_SETTINGS = 4  # type of the frame that an HTTP/2 server sends first
_TIMEOUT = 1.0  # seconds
_NAMES = {"grpc": "gRPC", "http": "HTTP"}
_PORTS = {"grpc": GRPC_PORT, "http": HTTP_PORT}


def spoken(url: str) -> Protocol | None:
    """The protocol of the server at `url` (HOST:PORT or unix:PATH); None without an answer or for another protocol."""
    first = _first_bytes(url, _HTTP2)
    if len(first) > 3 and first[3] == _SETTINGS and not first.startswith(b"HTTP/"):
        return "grpc"
    if first.startswith(b"HTTP/1") or _first_bytes(url, _HTTP1).startswith(b"HTTP/1"):
        return "http"
    return None


def other_protocol(url: str, asked: Protocol) -> ForgeError | None:
    """The error for a port that has the protocol other than `asked`; None if that is not the problem."""
    found = spoken(url)
    if found is None or found == asked:
        return None
    return ForgeError(
        f"{url} speaks {_NAMES[found]}, not {_NAMES[asked]}",
        hint=f"Give the {_NAMES[asked]} port ({_PORTS[asked]} by default); `trtforge infer` also takes "
        f"--protocol {found}.",
    )


def _first_bytes(url: str, said: bytes) -> bytes:
    with suppress(OSError, ValueError), _connected(Address.parse(url)) as connection:
        connection.sendall(said)
        return connection.recv(64)
    return b""


def _connected(address: Address) -> socket.socket:
    if address.path is None:
        return socket.create_connection((address.host, address.port), timeout=_TIMEOUT)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_TIMEOUT)
    connection.connect(address.path)
    return connection
