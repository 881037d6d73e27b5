"""uvicorn's HTTP/1.1 with h11, which bounds the size of headers, and with timeouts for inactive clients."""

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from trtforge.gateway.app import HEALTH
from trtforge.gateway.errors import ApiError, bad_request
from trtforge.gateway.exchange import Exchange
from trtforge.gateway.limits import GatewayLimits

HEAD_SECONDS = 10.0
"""From the start of a connection, or the first byte of a later request, until its headers are complete."""
REFUSED_SECONDS = 1.0
"""HEAD_SECONDS for a connection beyond the limit."""
HEAD_BYTES = 64 * 1024
"""Size of a request's path and headers together."""
UNREAD_SECONDS = 60.0
"""For a client that does not read."""
_TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
_CLOSE = {"connection": "close"}


class BoundedProtocol(H11Protocol):
    """A connection that is closed if a request's headers do not arrive or the client does not read the answer.

    uvicorn itself would wait for ever, and the connection would count towards the limit.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # uvicorn's own refusal beyond the limit is plain text, without Retry-After.
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._beyond = False
        self._served, self.app = self.app, self._unless_refused

    async def _unless_refused(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, unless the connection or the headers are over a limit."""
        error = self._why_refused(scope)
        if error is None:
            await self._served(scope, receive, closing(send) if self._beyond else send)
        else:
            await Exchange(scope, receive, send, GatewayLimits()).whole(error.status, error.body(), error.headers)

    def _why_refused(self, scope: Any) -> ApiError | None:
        if self._beyond and scope["path"] != HEALTH:
            return ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._most} connections are open; retry in 1 s",
                code="server_unavailable",
                headers={"retry-after": "1", **_CLOSE},
            )
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            message = "Content-Length and Transfer-Encoding exclude each other"
            return ApiError(HTTPStatus.BAD_REQUEST, message, headers=_CLOSE)
        # h11 bounds only incomplete headers, and they may arrive in one piece.
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        return _too_large() if size > HEAD_BYTES else None

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._beyond = self._most is not None and len(self.connections) > self._most and self._within() > self._most
        self._start()

    def _within(self) -> int:
        """The number of connections, including this one, that will not be closed at once."""
        return sum(not (isinstance(each, BoundedProtocol) and each._beyond) for each in self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop()
        self._was_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if not self._waiting:
            self._stop()
        elif self._timer is None:
            self._start()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._is_unread()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._was_read()

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        super().on_response_complete()
        self._closes()

    def timeout_keep_alive_handler(self) -> None:
        """See H11Protocol."""
        super().timeout_keep_alive_handler()
        self._closes()

    def send_400_response(self, msg: str) -> None:
        """See H11Protocol, which fails if a response has begun, as for bytes after a request that was refused early."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = _refusal_of(sys.exc_info()[1])  # uvicorn calls this while it handles h11's error
            body = refusal.body()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            head = h11.Response(status_code=refusal.status, headers=headers)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._closes()

    @property
    def _waiting(self) -> bool:
        """Whether a request's headers are incomplete or no request has begun."""
        return self.cycle is None or self.cycle.response_complete

    def _start(self) -> None:
        self._timer = self.loop.call_later(REFUSED_SECONDS if self._beyond else HEAD_SECONDS, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._waiting:
            self.transport.close()
            self._closes()

    def _closes(self) -> None:
        """Bound the time of a closing transport, which waits until everything is sent."""
        if self.transport.is_closing():
            self._is_unread()

    def _is_unread(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def closing(send: Any) -> Any:
    """A `send` that closes the connection after the response."""

    async def send_last(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_last


def _refusal_of(error: BaseException | None) -> ApiError:
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == _TOO_LARGE:
        return _too_large()
    why = str(error or "").partition(": bytearray(")[0]  # without the client's data
    return bad_request(f"the request is not HTTP/1.1{why and ': '}{why:.200}")


def _too_large() -> ApiError:
    return ApiError(_TOO_LARGE, "the headers of the request are too large", headers=_CLOSE)
