"""One request to Triton's own HTTP on its own connection: closing the connection cancels the request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus

import h11

from trtforge.serve.address import Address
from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.refusal import Refusal, unavailable

_PIECE = 64 * 1024
_BROKEN = (OSError, h11.RemoteProtocolError, asyncio.IncompleteReadError)


class Exchange:
    """A request that was sent and its response, piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._connection = h11.Connection(h11.CLIENT)

    async def send(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> h11.Response:
        """Send the request; returns the head of the response. Raises Refusal (502) if there is none."""
        fixed = [(b"host", b"triton"), (b"connection", b"close"), (b"content-length", str(len(body)).encode())]
        request = h11.Request(method=method, target=path, headers=[*fixed, *headers])
        events: list[h11.Event] = [request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()]
        try:
            self._writer.write(b"".join(self._connection.send(event) or b"" for event in events))
            await self._writer.drain()
            while True:
                event = await self._event()
                if isinstance(event, h11.Response):
                    return event
                if not isinstance(event, h11.InformationalResponse):
                    break
        except _BROKEN:
            pass
        raise Refusal(HTTPStatus.BAD_GATEWAY, "UNAVAILABLE: the server ended the request without an answer")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises ConnectionError if it is incomplete."""
        while True:
            try:
                event = await self._event()
            except _BROKEN as error:
                raise ConnectionError("the answer broke off") from error
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise ConnectionError("the answer broke off")

    async def whole(self, limit: int) -> bytes:
        """The body, truncated to about `limit` bytes."""
        kept = bytearray()
        with contextlib.suppress(ConnectionError):
            async for piece in self.pieces():
                if len(kept) < limit:
                    kept += piece
        return bytes(kept)

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._connection.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            self._connection.receive_data(await self._reader.read(_PIECE))


@contextlib.asynccontextmanager
async def exchange(address: Address, limits: FrontLimits) -> AsyncIterator[Exchange]:
    """A new connection to Triton, always closed at the end. Raises Refusal (503) if connecting fails."""
    opening = (
        asyncio.open_unix_connection(address.path)
        if address.path is not None
        else asyncio.open_connection(address.host, address.port)
    )
    try:
        reader, writer = await asyncio.wait_for(opening, limits.connect_seconds)
    except (OSError, asyncio.TimeoutError):
        raise unavailable("the server is starting, stopping or gone", limits.retry_seconds) from None
    try:
        yield Exchange(reader, writer)
    finally:
        writer.transport.abort()
