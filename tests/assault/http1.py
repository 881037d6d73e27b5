"""HTTP/1.1 over plain sockets, byte for byte as an attack wants it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tests.assault.client import Answer
from tests.assault.messages import is_refusal

Chunks = AsyncIterator[bytes]


@dataclass(frozen=True)
class Response:
    """What came back. `status` 0: the connection ended, or was silent, before a status line."""

    status: int
    body: bytes
    closed: bool
    seconds: float


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is reset at the end if anything is unread."""
    host, _, port = url.partition(":")
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port), limit=1 << 24), 30)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request_bytes(
    path: str,
    body: bytes = b"",
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    length: str | None = "",
) -> bytes:
    """A request; `length` None: without Content-Length, empty: the right one."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    if length is not None:
        lines.append(f"Content-Length: {length or len(body)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def exchange(
    url: str, sent: bytes | Callable[[], Chunks], within: float, *, half_close: bool = False
) -> Response:
    """Send bytes as they are, read one response. Never raises for what the server does."""
    start = time.monotonic()

    def ended(status: int, body: bytes, closed: bool) -> Response:
        return Response(status, body, closed, time.monotonic() - start)

    try:
        async with connection(url) as (reader, writer):
            sending = asyncio.create_task(_send(writer, sent, half_close))
            try:
                status, body = await asyncio.wait_for(_read_response(reader), within)
                return ended(status, body, False)
            finally:
                sending.cancel()
    except asyncio.TimeoutError:
        return ended(0, b"", False)
    except (OSError, EOFError, ValueError):
        return ended(0, b"", True)


async def generate(url: str, prompt: str, max_tokens: int, within: float, model: str = "ensemble") -> Answer:
    """One request to the generate endpoint."""
    body = json.dumps({"text_input": prompt, "max_tokens": max_tokens}).encode()
    response = await exchange(url, request_bytes(f"/v2/models/{model}/generate", body), within)
    if response.status == 0:
        return Answer("lost" if response.closed else "silent", error=f"after {response.seconds:.1f} s")
    try:
        values = json.loads(response.body)
    except ValueError:
        return Answer("error", error=f"{response.status} {response.body[:200]!r}", seconds=response.seconds)
    if response.status == 200:
        return Answer("answered", str(values.get("text_output", "")), responses=1, seconds=response.seconds)
    error = error_of(values) or f"{response.status} without an error"
    return Answer("refused" if is_refusal(error) else "error", error=error, seconds=response.seconds)


def error_of(values: object) -> str:
    """The message of an error response: Triton's form, or OpenAI's."""
    error = values.get("error", "") if isinstance(values, dict) else ""
    return str(error.get("message", "") if isinstance(error, dict) else error)


async def leave_stream(url: str, prompt: str, max_tokens: int, pieces: int, within: float) -> Answer:
    """A generate_stream request whose client closes its connection after some pieces."""
    body = json.dumps({"text_input": prompt, "max_tokens": max_tokens, "stream": True}).encode()

    async def read() -> Answer:
        async with connection(url) as (reader, writer):
            writer.write(request_bytes("/v2/models/ensemble/generate_stream", body))
            seen = 0
            while seen < pieces:
                line = await reader.readline()
                if not line:
                    return Answer("lost", error="the connection ended")
                seen += line.startswith(b"data:")
                if b'"error"' in line:
                    error = error_of(json.loads(line.strip().removeprefix(b"data:")))
                    return Answer("refused" if is_refusal(error) else "error", error=error)
                if line == b"0\r\n":  # the last chunk: the answer was shorter than the client's patience
                    break
            return Answer("cancelled", responses=seen)

    try:
        return await asyncio.wait_for(read(), within)
    except asyncio.TimeoutError:
        return Answer("silent", error=f"nothing final within {within:.0f} s")
    except (OSError, ValueError) as error:
        return Answer("lost", error=str(error))


async def _send(writer: asyncio.StreamWriter, sent: bytes | Callable[[], Chunks], half_close: bool) -> None:
    with suppress(OSError):
        if isinstance(sent, bytes):
            writer.write(sent)
            await writer.drain()
        else:
            async for chunk in sent():
                writer.write(chunk)
                await writer.drain()
        if half_close:
            writer.write_eof()


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    while True:
        line = await reader.readline()
        if not line:
            raise EOFError
        status = int(line.split()[1])
        headers = {}
        while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        if status != 100:
            break
    if "chunked" in headers.get("transfer-encoding", ""):
        return status, await _chunks(reader)
    if "content-length" in headers:
        return status, await reader.readexactly(int(headers["content-length"]))
    return status, await reader.read()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        body += await reader.readexactly(size)
        await reader.readline()
    return body
