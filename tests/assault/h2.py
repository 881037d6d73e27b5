"""gRPC by hand over one socket: a client that costs little, or one that never reads.

Frames: RFC 9113. Headers are sent as literals (RFC 7541, 6.2.2); those of the server are not read.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_LARGEST_WINDOW = 2**31 - 1
_DEFAULT_WINDOW = 65535
_LARGEST_FRAME = 16384


class Connection:
    """A connection with one stream a request. `window`: bytes that a stream may send before it waits for us."""

    def __init__(self, url: str, *, window: int = _LARGEST_WINDOW, receive_buffer: int | None = None) -> None:
        host, _, port = url.partition(":")
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(30)
        self.socket.connect((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._url = url
        self._next = 1
        settings = struct.pack(">HIHI", 2, 0, 4, window)
        grow = struct.pack(">I", _LARGEST_WINDOW - _DEFAULT_WINDOW)
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, grow)
        )

    def open(self, path: str, message: bytes) -> int:
        """Start a request of one message; its stream's id. The message must fit into one frame."""
        stream, self._next = self._next, self._next + 2
        fields = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._url),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        )
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
        data = struct.pack(">BI", 0, len(message)) + message
        assert len(data) <= _LARGEST_FRAME
        self.socket.sendall(_frame(_HEADERS, _END_HEADERS, stream, block) + _frame(_DATA, _END_STREAM, stream, data))
        return stream

    def close(self, *, reset: bool = False) -> None:
        """End the connection, with a TCP reset if asked for."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with suppress(OSError):
            self.socket.close()


class Reader:
    """Cuts what a connection receives into frames, and answers what the protocol wants answered."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[tuple[int, bytes, bool]]:
        """Stream, the data of its frame and whether the stream has ended, for each frame that matters.

        Raises ConnectionError if the server ends the connection.
        """
        buffer = self._rest + received if self._rest else received
        at, size = 0, len(buffer)
        while size - at >= 9:
            length = int.from_bytes(buffer[at : at + 3], "big")
            if size - at < 9 + length:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big")
            payload = buffer[at + 9 : at + 9 + length]
            at += 9 + length
            if kind == _DATA or (kind in (_HEADERS, _RST) and (flags & _END_STREAM or kind == _RST)):
                yield stream, payload if kind == _DATA else b"", kind == _RST or bool(flags & _END_STREAM)
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._connection.socket.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
            elif kind == _GOAWAY:
                raise ConnectionError("the server ends the connection")
        self._rest = buffer[at:]


def messages(data: bytes) -> Iterator[bytes]:
    """The gRPC messages in the data of one stream."""
    at = 0
    while at + 5 <= len(data):
        length = int.from_bytes(data[at + 1 : at + 5], "big")
        yield data[at + 5 : at + 5 + length]
        at += 5 + length


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _text(value: str) -> bytes:
    assert len(value) < 127
    return bytes([len(value)]) + value.encode()
