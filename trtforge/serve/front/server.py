"""The front as a server: accepts connections up to its limit and shuts down gracefully."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from http import HTTPStatus

from trtforge.machine.processes import raise_open_file_limit
from trtforge.serve.front.handler import Handler, Policy
from trtforge.serve.front.incoming import ClientGone, Incoming, linger
from trtforge.serve.front.refusal import Refusal, error_body, unavailable

_BACKLOG = 4096
_UNREAD_SECONDS = 1.0  # for the rest of requests that are arriving when the front stops
_SPARE_FILES = 32
_FILES_PER_CONNECTION = 3
"""One for the client, one for Triton, and one for a rejected client."""


class Front:
    """Listens on one address until it is told to stop."""

    def __init__(self, policy: Policy, host: str, port: int) -> None:
        self._policy = policy
        self._host = host
        self._port = port
        self._handler = Handler(policy)
        self._connections: dict[asyncio.Task[None], Incoming] = {}
        files = max(raise_open_file_limit() - 2 * _SPARE_FILES, _FILES_PER_CONNECTION)
        self._most = min(policy.limits.connections, files // _FILES_PER_CONNECTION)
        self._most_turned_away = files - 2 * self._most
        self._turned_away = 0
        self._too_many = _refusal_bytes(unavailable(f"{self._most} connections are open", policy.limits.retry_seconds))
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until `stop`, then let running requests finish. Raises OSError if the address is in use."""
        server = await asyncio.start_server(self._connected, self._host, self._port, backlog=_BACKLOG)
        async with server:
            await self._stopping.wait()
            server.close()
            self._cancel(lambda client: client.idle)
            if self._connections:
                await asyncio.wait(set(self._connections), timeout=_UNREAD_SECONDS)
            self._cancel(lambda client: client.unread)
            while self._connections:
                await asyncio.wait(set(self._connections))

    def stop(self) -> None:
        """Stop accepting connections; on the second call, cancel the running requests."""
        if self._stopping.is_set():
            for task in self._connections:
                task.cancel()
        self._stopping.set()

    def _cancel(self, which: Callable[[Incoming], bool]) -> None:
        for task, client in list(self._connections.items()):
            if which(client):
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= self._most:
            await self._turn_away(reader, writer)
            return
        client = Incoming(reader, writer, self._policy.limits)
        self._connections[task] = client
        try:
            await self._serve(client)
            await linger(reader, writer, self._policy.limits.linger_seconds)
            await client.close()
        except (ClientGone, ConnectionError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._connections.pop(task, None)
            with contextlib.suppress(OSError):
                writer.close()

    async def _serve(self, client: Incoming) -> None:
        first = True
        while not self._stopping.is_set():
            try:
                request = await client.request(first)
                if request is None:
                    return
                await self._handler.answer(client, request)
            except Refusal as refusal:
                await client.refuse(refusal)
            except (ClientGone, ConnectionError):
                raise
            except Exception as error:
                # A bug of the front: the client must not wait, and other connections continue. Only the type is
                # logged, because the message may hold text of the request.
                print(f"front: {type(error).__name__} while answering a request", file=sys.stderr, flush=True)
                await client.refuse(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL: the front failed"))
            if not client.next():
                return
            first = False

    async def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer 503: too many connections. If no file descriptor is left to linger on, a TCP reset may come first."""
        self._turned_away += 1
        try:
            writer.write(self._too_many)
            if self._turned_away <= self._most_turned_away:
                await linger(reader, writer, self._policy.limits.linger_seconds)
        except (ConnectionError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._turned_away -= 1
            with contextlib.suppress(OSError):
                writer.close()


def _refusal_bytes(refusal: Refusal) -> bytes:
    """A complete response, for a client whose request is not read."""
    body = error_body(refusal.message)
    fixed = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"{name}: {value}" for name, value in (fixed | refusal.headers).items()]
    head = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}"
    return "\r\n".join([head, *lines, "", ""]).encode() + body
