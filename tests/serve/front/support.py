"""A front before a stand-in for Triton, both in one event loop, and raw HTTP to talk to them."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.patience import PATIENCE
from tests.ports import free_ports
from trtforge.core.host_check import HostCheck
from trtforge.serve.address import Address
from trtforge.serve.front.handler import Policy
from trtforge.serve.front.keys import Keys
from trtforge.serve.front.limits import FrontLimits
from trtforge.serve.front.server import Front

GENERATE = "/v2/models/ensemble/generate"
STREAM = "/v2/models/ensemble/generate_stream"


@dataclass
class FakeTriton:
    """Answers every request with `answer`, or as `act` does; keeps what it was asked."""

    answer: bytes = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"ok":true}'
    act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    gone: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        self.bodies.append(await reader.readexactly(length))
        try:
            if self.act is not None:
                await self.act(reader, writer)
            else:
                writer.write(self.answer)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
            self.gone += 1


@dataclass
class Answer:
    """A response as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The text of the error that a JSON body holds."""
        assert self.headers["content-type"] == "application/json"
        value = json.loads(self.body)["error"]
        assert isinstance(value, str)
        return value


@dataclass
class Running:
    """A front that listens on `port`."""

    front: Front
    port: int
    triton: FakeTriton
    serving: "asyncio.Task[None]"

    async def send(self, data: bytes) -> Answer:
        """The answer to raw bytes on a connection of their own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            return await asyncio.wait_for(read_answer(reader), PATIENCE)
        finally:
            writer.close()

    async def post(self, path: str, body: bytes, *headers: str) -> Answer:
        """The answer to a POST with a Content-Length."""
        return await self.send(post_bytes(path, body, *headers))


def post_bytes(path: str, body: bytes, *headers: str) -> bytes:
    """A POST as it is sent."""
    return request_bytes("POST", path, f"Content-Length: {len(body)}", *headers) + body


def request_bytes(method: str, path: str, *headers: str) -> bytes:
    """A request's head as it is sent."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One response, framed by length, chunks or the end of the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding", "").lower() == "chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        body = await reader.read()
    return Answer(int(status.split()[1]), headers, body)


@asynccontextmanager
async def running(
    triton: FakeTriton | None = None,
    limits: FrontLimits | None = None,
    opened: tuple[str, ...] = (),
    keys: Keys | None = None,
    hosts: HostCheck | None = None,
    *,
    upstream: bool = True,
) -> AsyncIterator[Running]:
    """A front that runs meanwhile. `upstream` False: nothing listens where Triton should."""
    triton, limits = triton or FakeTriton(), limits or FrontLimits()
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "http.sock"))
        server = await asyncio.start_unix_server(triton.serve, path) if upstream else None
        port = free_ports(1)[0]
        front = Front(Policy(Address(path), opened, keys, limits, hosts), "127.0.0.1", port)
        serving = asyncio.ensure_future(front.run())
        while not serving.done():
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                break
        try:
            yield Running(front, port, triton, serving)
        finally:
            front.stop()
            front.stop()
            await asyncio.wait_for(serving, PATIENCE)
            if server is not None:
                server.close()
