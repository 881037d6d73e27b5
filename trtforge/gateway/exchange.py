"""One HTTP request and its response over ASGI: bounded body, whole or streamed answer, detection of disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, TypeVar

from trtforge.gateway.errors import ApiError, bad_request
from trtforge.gateway.limits import GatewayLimits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Result = TypeVar("Result")

_JSON = (b"content-type", b"application/json")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class ClientGone(Exception):
    """The client closed the connection."""


class Exchange:
    """One request. `status`: of the response, 0 before it begins; `failure`: the events that end a failed stream."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: GatewayLimits) -> None:
        self._receive, self._send, self._limits = receive, send, limits
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.status = 0
        self.failure: Callable[[ApiError], bytes] | None = None

    def require_bounded(self) -> None:
        """Raises ApiError for a body that is compressed or whose declared length is too large."""
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not accepted")
        declared = self.headers.get(b"content-length")
        if declared is None:
            return
        if not declared.isdigit() or int(declared.lstrip(b"0")[:15] or b"0") > self._limits.body_bytes:
            raise self._too_large()

    async def body(self, hold: Callable[[int], None]) -> bytes:
        """The whole body. `hold` is called with the number of arriving bytes and may raise ApiError.

        Raises ApiError (408, 413) and ClientGone.
        """
        try:
            return await asyncio.wait_for(self._body(hold), self._limits.body_seconds)
        except (asyncio.TimeoutError, TimeoutError):
            message = f"the body was not complete after {self._limits.body_seconds:g} s"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, headers={"connection": "close"}) from None

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` after the body was read; cancel it and raise ClientGone as soon as the client disconnects."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() or working.cancelled():
                raise ClientGone
            return working.result()
        finally:
            for task in (working, leaving):
                if not task.done():
                    task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a JSON response."""
        more = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        self.status = status
        await self._sent({"type": "http.response.start", "status": status, "headers": [_JSON, length, *more]})
        await self._sent({"type": "http.response.body", "body": body})

    async def begin_events(self, failure: Callable[[ApiError], bytes]) -> None:
        """Begin a stream of server-sent events. `failure`: the events that end it if it fails."""
        self.failure = failure
        self.status = int(HTTPStatus.OK)
        await self._sent({"type": "http.response.start", "status": self.status, "headers": list(_EVENTS)})

    async def events(self, events: bytes, *, more: bool = True) -> None:
        """Send events. Raises ClientGone if the client stops reading."""
        await self._sent({"type": "http.response.body", "body": events, "more_body": more})

    async def _sent(self, message: MutableMapping[str, Any]) -> None:
        """Send a message; a client that does not read for long counts as gone."""
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self._limits.stalled_seconds, task.cancel)
        try:
            await self._send(message)
        except OSError:
            raise ClientGone from None
        finally:
            timer.cancel()

    async def _body(self, hold: Callable[[int], None]) -> bytes:
        pieces, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            size += len(piece)
            if size > self._limits.body_bytes:
                raise self._too_large()
            hold(len(piece))
            pieces.append(piece)
            if not message.get("more_body", False):
                break
        if not size:
            raise bad_request("the request has no body")
        return b"".join(pieces)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._limits.body_bytes} bytes",
            headers={"connection": "close"},
        )
