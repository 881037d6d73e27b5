"""The front as a server: accepts connections within its limit, ends them in order."""

import asyncio
import contextlib
import resource
import socket
import sys
from http import HTTPStatus

from trtforge.serve.front.handler import Handler, Policy
from trtforge.serve.front.incoming import ClientGone, Incoming
from trtforge.serve.front.refusal import Refusal, unavailable

_BACKLOG = 4096
_SPARE_FILES = 32
_FILES_PER_CONNECTION = 3
"""The client's, Triton's, and that of one more client who is told that there are too many."""


class Front:
    """Listens on one address until it is told to stop."""

    def __init__(self, policy: Policy, host: str, port: int) -> None:
        self._policy = policy
        self._host = host
        self._port = port
        self._handler = Handler(policy)
        self._connections: dict[asyncio.Task[None], Incoming] = {}
        self._most = min(policy.limits.connections, _files() // _FILES_PER_CONNECTION)
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until `stop`, then let running requests finish. Raises OSError if the address is in use."""
        server = await asyncio.start_server(self._connected, self._host, self._port, backlog=_BACKLOG)
        async with server:
            await self._stopping.wait()
            server.close()
            for task, client in list(self._connections.items()):
                if client.idle:
                    task.cancel()
            while self._connections:
                await asyncio.wait(set(self._connections))

    def stop(self) -> None:
        """Accept nothing more; the second time, end what runs."""
        if self._stopping.is_set():
            for task in self._connections:
                task.cancel()
        self._stopping.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        client = Incoming(reader, writer, self._policy.limits)
        full = len(self._connections) >= self._most
        if len(self._connections) >= 2 * self._most + _SPARE_FILES:
            writer.transport.abort()
            return
        self._connections[task] = client
        connection = writer.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await (self._turn_away(client) if full else self._serve(client))
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
                # An error of the front's own: the client must not wait, and other connections go on. The type says
                # enough without the request's text.
                print(f"front: {type(error).__name__} while a request was answered", file=sys.stderr, flush=True)
                await client.refuse(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL: the front failed"))
            if not client.next():
                await client.linger()
                return
            first = False

    async def _turn_away(self, client: Incoming) -> None:
        await client.refuse(unavailable(f"{self._most} connections are open", self._policy.limits.retry_seconds))
        await client.linger()


def _files() -> int:
    """Files that this process may have open for connections, after the limit was raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft - 2 * _SPARE_FILES, _FILES_PER_CONNECTION)
