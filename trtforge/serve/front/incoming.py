"""A client's connection: reads heads and bodies within their limits, writes answers; h11 does the framing."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

import h11

from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.refusal import Refusal, error_body

_PIECE = 64 * 1024
_NAME = b"trtforge"
_GRACE = 0.05  # seconds
_QUOTED = re.compile(r": bytearray\(.*", re.DOTALL)  # the client's line in h11's messages
T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection or does not read its answer."""


class Incoming:
    """A client's connection, which carries successive requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: FrontLimits) -> None:
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self.answering = False

    @property
    def idle(self) -> bool:
        """Whether no request has begun."""
        return self._connection.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE} and not any(
            self._connection.trailing_data
        )

    @property
    def unread(self) -> bool:
        """Whether no request has arrived completely and no answer is being sent."""
        states = self._connection.states
        return states[h11.CLIENT] in (h11.IDLE, h11.SEND_BODY) and states[h11.SERVER] in (h11.IDLE, h11.SEND_RESPONSE)

    async def request(self, first: bool) -> h11.Request | None:
        """The head of the next request; None if the client closes or stays idle. Raises Refusal (400, 408, 431)."""
        seconds = self._limits.head_seconds if first else self._limits.idle_seconds
        if self._connection.trailing_data[0] == b"":
            try:
                data = await _within(seconds, lambda: self._reader.read(_PIECE))
            except asyncio.TimeoutError:
                if first:
                    raise Refusal(HTTPStatus.REQUEST_TIMEOUT, f"no request arrived within {seconds:g} s") from None
                return None
            if not data:
                return None
            self._connection.receive_data(data)
        try:
            event = await _within(self._limits.head_seconds, self._event)
        except asyncio.TimeoutError:
            raise Refusal(
                HTTPStatus.REQUEST_TIMEOUT, f"the headers were not complete after {self._limits.head_seconds:g} s"
            ) from None
        if not isinstance(event, h11.Request):
            return None
        self._check_head(event)
        return event

    async def body(self, limit: int, hold: Callable[[int], None]) -> bytes:
        """The body of the request in one piece. `hold` is called with the number of arriving bytes and may raise
        Refusal.

        Raises Refusal (400, 408, 413).
        """
        try:
            return await asyncio.wait_for(self._body(limit, hold), self._limits.body_seconds)
        except asyncio.TimeoutError:
            raise Refusal(
                HTTPStatus.REQUEST_TIMEOUT, f"the body was not complete after {self._limits.body_seconds:g} s"
            ) from None

    async def gone(self) -> None:
        """Return when the client closes the connection. Data that it sends before is kept for the next request."""
        kept = 0
        while kept < _PIECE:
            data = await self._reader.read(_PIECE)
            if not data:
                return
            self._connection.receive_data(data)
            kept += len(data)
        await asyncio.Event().wait()

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status and headers of the answer."""
        self.answering = True
        await self._send(h11.Response(status_code=status, headers=[(b"server", _NAME), *headers]))

    async def piece(self, data: bytes) -> None:
        """Send a piece of the answer."""
        await self._send(h11.Data(data=data))

    async def finish(self) -> None:
        """End the answer."""
        await self._send(h11.EndOfMessage())

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error; the connection closes if the request was not read completely."""
        if self._connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise ClientGone
        body = error_body(refusal.message)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        if self._connection.their_state is not h11.DONE:
            headers["connection"] = "close"
        await self.start(refusal.status, [(name.encode(), value.encode()) for name, value in headers.items()])
        await self.piece(body)
        await self.finish()

    def next(self) -> bool:
        """Whether the connection can take another request."""
        if self._connection.our_state is not h11.DONE or self._connection.their_state is not h11.DONE:
            return False
        self._connection.start_next_cycle()
        self.answering = False
        return True

    async def close(self) -> None:
        """Close the connection. Raises ClientGone if the client does not read the rest of its answer."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), self._limits.stalled_seconds)
        except asyncio.TimeoutError:
            raise ClientGone from None

    async def _body(self, limit: int, hold: Callable[[int], None]) -> bytes:
        if self._connection.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[]))
        body, pieces = bytearray(), 0
        while True:
            event = await self._event()
            if isinstance(event, h11.Data):
                body += event.data
                pieces += event.chunk_end
                if len(body) > limit:
                    raise too_large(limit)
                hold(len(event.data))
                if pieces > self._limits.chunks:
                    raise Refusal(
                        HTTPStatus.BAD_REQUEST, f"the body has more than {self._limits.chunks} chunks; send larger ones"
                    )
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            else:
                raise ClientGone

    async def _event(self) -> object:
        while True:
            try:
                event = self._connection.next_event()
            except h11.RemoteProtocolError as error:
                if self._reader.at_eof():
                    raise ClientGone from None
                said = _QUOTED.sub("", str(error))
                raise Refusal(error.error_status_hint, f"the request is not HTTP/1.1: {said}") from None
            if event is not h11.NEED_DATA:
                return event
            self._connection.receive_data(await self._reader.read(_PIECE))

    async def _send(self, event: h11.Event) -> None:
        data = self._connection.send(event)
        if not data:
            return
        try:
            self._writer.write(data)
            transport = self._writer.transport
            if transport.is_closing() or transport.get_write_buffer_size() > _PIECE:
                await asyncio.wait_for(self._writer.drain(), self._limits.stalled_seconds)
        except (OSError, asyncio.TimeoutError):
            raise ClientGone from None

    def _check_head(self, request: h11.Request) -> None:
        if request.http_version not in (b"1.0", b"1.1"):
            raise Refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "use HTTP/1.0 or HTTP/1.1")
        lines = list(request.headers)
        if len(lines) > self._limits.headers:
            raise Refusal(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the request has {len(lines)} headers, at most {self._limits.headers} are accepted",
            )
        size = len(request.target) + sum(len(name) + len(value) for name, value in lines)
        if size > self._limits.head_bytes:
            raise Refusal(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the headers have {size} bytes, at most {self._limits.head_bytes} are accepted",
            )


async def linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Read and drop further data of the client for at most `seconds`: a TCP reset would destroy the answer."""

    async def drop() -> None:
        while await reader.read(_PIECE):
            pass

    with contextlib.suppress(OSError, RuntimeError, asyncio.TimeoutError):
        if writer.can_write_eof():
            writer.write_eof()
        await asyncio.wait_for(drop(), seconds)


async def _within(seconds: float, read: Callable[[], Awaitable[T]]) -> T:
    """The result of `read` within `seconds`, with some grace for data that a busy event loop reads late."""
    try:
        return await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError:
        return await asyncio.wait_for(read(), _GRACE)


def too_large(limit: int) -> Refusal:
    """The refusal (413) of a body of more than `limit` bytes."""
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {limit} bytes")
