"""Frames of the channel between model processes and the engine process.

A frame is two little-endian uint32 (sizes of header and payload in bytes), the header as a JSON object, and the
payload as raw bytes (token ids and biases of requests).
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_SIZES = struct.Struct("<II")
LARGEST_HEADER = 64 << 20
LARGEST_PAYLOAD = 1 << 30


class BadFrame(Exception):
    """Received bytes are not a frame of this protocol."""


_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Frame:
    """One message."""

    header: Mapping[str, Any]
    payload: bytes = b""

    def field(self, name: str, kind: type[_Value]) -> _Value:
        """A value of the header. Raises BadFrame if it is absent or of another type."""
        value = self.header.get(name)
        if not isinstance(value, kind):
            raise BadFrame(f"frame of type {self.header.get('type')!r}: {name} is {value!r}")
        return value

    def encode(self) -> bytes:
        """The bytes to send."""
        header = json.dumps(self.header, separators=(",", ":")).encode()
        return _SIZES.pack(len(header), len(self.payload)) + header + self.payload


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Raises BadFrame for sizes over the limits and headers that are not JSON."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _SIZES.size:
            header_size, payload_size = _sizes(self._buffer, start)
            body = start + _SIZES.size
            end = body + header_size + payload_size
            if len(self._buffer) < end:
                break
            header = _header(bytes(self._buffer[body : body + header_size]))
            yield Frame(header, bytes(self._buffer[body + header_size : end]))
            start = end
        del self._buffer[:start]


def require_readable(data: bytes) -> None:
    """Raises BadFrame for an encoded frame that the other side would refuse by ending the connection."""
    _sizes(data, 0)


def _sizes(data: bytes | bytearray, start: int) -> tuple[int, int]:
    """Sizes of the header and payload of the frame that begins at `start`. Raises BadFrame if they are too large."""
    header_size, payload_size = _SIZES.unpack_from(data, start)
    if header_size > LARGEST_HEADER or payload_size > LARGEST_PAYLOAD:
        raise BadFrame(f"frame too large: {header_size} + {payload_size} bytes")
    return header_size, payload_size


def _header(data: bytes) -> Mapping[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadFrame("a header that is not an object")
    return header
