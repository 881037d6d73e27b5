"""The front before a stand-in for Triton: limits, framing, keys, departures."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.serve.front.support import (
    GENERATE,
    STREAM,
    Answer,
    FakeTriton,
    Running,
    post_bytes,
    read_answer,
    request_bytes,
    running,
)
from trtforge.serve.front.incoming import ClientGone, Incoming
from trtforge.serve.front.keys import read_keys
from trtforge.serve.front.limits import FrontLimits

GOOD = b'{"text_input":"a","max_tokens":2}'
EVENT = b'data: {"text_output":"a"}\n\n'
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def with_front(test: Callable[[Running], Awaitable[None]], **options: object) -> None:
    async def run() -> None:
        async with running(**options) as front:  # type: ignore[arg-type]
            await test(front)

    asyncio.run(run())


def test_a_request_goes_on_in_one_piece_with_few_headers() -> None:
    async def test(front: Running) -> None:
        answer = await front.post(GENERATE, GOOD, "Content-Type: application/json", "Accept-Encoding: gzip", "X-A: b")
        assert (answer.status, answer.body) == (200, b'{"ok":true}')
        head = front.triton.heads[0].lower()
        assert head.splitlines()[0] == f"post {GENERATE} http/1.1"
        assert "content-type: application/json" in head
        assert not any(name in head for name in ("accept-encoding", "x-a", "transfer-encoding"))
        assert front.triton.bodies == [GOOD]

    with_front(test)


def test_chunks_are_put_together() -> None:
    async def test(front: Running) -> None:
        head = request_bytes("POST", GENERATE, "Transfer-Encoding: chunked")
        body = b"".join(chunk(GOOD[i : i + 1]) for i in range(len(GOOD))) + b"0\r\n\r\n"
        assert (await front.send(head + body)).status == 200
        assert front.triton.bodies == [GOOD]
        assert f"content-length: {len(GOOD)}" in front.triton.heads[0].lower()

    with_front(test)


def test_a_connection_takes_one_request_after_the_other() -> None:
    async def test(front: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(post_bytes(GENERATE, GOOD) + post_bytes(GENERATE, b"[]") + request_bytes("GET", "/v2"))
        statuses = [(await read_answer(reader)).status for _ in range(3)]
        assert statuses == [200, 400, 200]
        writer.close()

    with_front(test)


def test_a_client_that_waits_for_100_is_told_to_go_on() -> None:
    async def test(front: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request_bytes("POST", GENERATE, f"Content-Length: {len(GOOD)}", "Expect: 100-continue"))
        assert b"100" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        writer.write(GOOD)
        assert (await read_answer(reader)).status == 200
        writer.close()

    with_front(test)


CASES = [
    (post_bytes(GENERATE, b"x" * (1024 * 1024 + 1)), 413, "larger than 1048576 bytes"),
    (request_bytes("POST", GENERATE, "Content-Length: 99999999999"), 413, "larger than"),
    (request_bytes("POST", GENERATE, "Transfer-Encoding: chunked") + chunk(b"x" * 1_100_000), 413, "larger than"),
    (request_bytes("POST", GENERATE, "Transfer-Encoding: chunked") + chunk(b"x") * 9000, 400, "more than 8192 chunks"),
    (post_bytes(GENERATE, b"[" * 200_000), 400, "arrays and objects"),
    (post_bytes(GENERATE, b'{"a":"\xff"}'), 400, "not valid UTF-8"),
    (post_bytes(GENERATE, GOOD, "Content-Encoding: gzip"), 415, "compressed bodies"),
    (post_bytes(GENERATE, GOOD, "Transfer-Encoding: chunked"), 400, "exclude each other"),
    (post_bytes(GENERATE, GOOD, "Authorization: a", "Authorization: b"), 400, "authorization is given twice"),
    (request_bytes("POST", GENERATE, "Transfer-Encoding: gzip"), 501, "not HTTP/1.1"),
    (request_bytes("POST", GENERATE, "Content-Length: x"), 400, "not HTTP/1.1"),
    (request_bytes("POST", GENERATE, "Content-Length: -1"), 400, "not HTTP/1.1"),
    (request_bytes("POST", GENERATE, "Content-Length: 1", "Content-Length: 2"), 400, "not HTTP/1.1"),
    (request_bytes("GET", "/v2", *[f"X-{i}: a" for i in range(70)]), 431, "71 headers, at most 64"),
    (request_bytes("GET", "/v2", "X: " + "a" * 17_000), 431, ""),
    (request_bytes("GET", "/v2") + b"", 200, ""),
    (b"GET /v2 HTTP/1.1\r\n\r\n", 400, "not HTTP/1.1"),
    (b"nonsense\r\n\r\n", 400, "not HTTP/1.1"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "not HTTP/1.1"),
    (b"GET /v2 HTTP/3.0\r\nHost: x\r\n\r\n", 505, "use HTTP/1.0 or HTTP/1.1"),
    (b"GET /v2 HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400, "not HTTP/1.1"),
    (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", 400, "not HTTP/1.1"),
    (b"GET /v2 HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", 400, "the request is not HTTP/1.1: illegal header line"),
    (request_bytes("GET", "/v2/logging"), 403, "logging is closed on this server"),
    (request_bytes("GET", "/nothing"), 404, "no such endpoint"),
    (request_bytes("PUT", GENERATE), 405, "this endpoint takes POST"),
    (post_bytes("/v2/models/e/infer", GOOD, "Inference-Header-Content-Length: x"), 400, "not a number of bytes"),
]


@pytest.mark.parametrize(("data", "status", "said"), CASES, ids=[str(i) for i in range(len(CASES))])
def test_malformed_requests_are_answered_and_do_not_reach_triton(data: bytes, status: int, said: str) -> None:
    async def test(front: Running) -> None:
        answer = await front.send(data)
        assert answer.status == status
        if status != 200:
            assert said in answer.error
            assert "bytearray" not in answer.error
            assert front.triton.heads == []

    with_front(test)


def test_a_slow_head_and_a_slow_body_end_with_408() -> None:
    limits = dataclasses.replace(FrontLimits(), head_seconds=0.2, body_seconds=0.2)

    async def test(front: Running) -> None:
        answer = await front.send(b"GET /v2 HTTP/1.1\r\nHost: x\r\n")
        assert (answer.status, answer.error) == (408, "the headers were not complete after 0.2 s")
        answer = await front.send(request_bytes("POST", GENERATE, "Content-Length: 10") + b"{")
        assert (answer.status, answer.error) == (408, "the body was not complete after 0.2 s")

    with_front(test, limits=limits)


def test_idle_connections_are_closed() -> None:
    limits = dataclasses.replace(FrontLimits(), head_seconds=0.5, idle_seconds=0.5)

    async def test(front: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        answer = await read_answer(reader)
        assert (answer.status, answer.error) == (408, "no request arrived within 0.5 s")
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request_bytes("GET", "/v2"))
        assert (await read_answer(reader)).status == 200
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()

    with_front(test, limits=limits)


async def _until_left(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins a stream and goes on until the other side leaves."""
    writer.write(SSE + chunk(EVENT))
    await reader.read()


def test_a_connection_whose_answer_is_not_read_ends() -> None:
    class Unread:
        def close(self) -> None: ...

        async def wait_closed(self) -> None:
            await asyncio.Event().wait()

    client = Incoming(Unread(), Unread(), FrontLimits(stalled_seconds=0.05))  # type: ignore[arg-type]
    with pytest.raises(ClientGone):
        asyncio.run(client.close())


def test_a_client_that_leaves_ends_its_request_in_triton() -> None:
    async def test(front: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(post_bytes(STREAM, GOOD))
        await asyncio.wait_for(reader.readuntil(EVENT), PATIENCE)
        assert front.triton.gone == 0
        writer.transport.abort()
        while not front.triton.gone:
            await asyncio.sleep(0.01)
        assert front.triton.gone == 1

    with_front(test, triton=FakeTriton(act=_until_left))


def test_a_client_that_leaves_before_the_first_token_ends_its_request_too() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def test(front: Running) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(post_bytes(GENERATE, GOOD))
        while not front.triton.bodies:
            await asyncio.sleep(0.01)
        writer.close()
        while not front.triton.gone:
            await asyncio.sleep(0.01)
        assert front.triton.gone == 1

    with_front(test, triton=FakeTriton(act=wait))


def test_events_come_through_one_by_one() -> None:
    ready = asyncio.Event()

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE)
        for _ in range(3):
            writer.write(chunk(EVENT))
            await writer.drain()
            await asyncio.wait_for(ready.wait(), PATIENCE)
            ready.clear()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def test(front: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(post_bytes(STREAM, GOOD))
        for _ in range(3):
            await asyncio.wait_for(reader.readuntil(EVENT), PATIENCE)
            ready.set()
        assert await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), PATIENCE) == b"\r\n0\r\n\r\n"
        writer.close()

    with_front(test, triton=FakeTriton(act=act))


def test_more_requests_and_connections_than_allowed_get_503_at_once() -> None:
    async def test(front: Running) -> None:
        _, first = await asyncio.open_connection("127.0.0.1", front.port)
        first.write(post_bytes(STREAM, GOOD))
        while not front.triton.bodies:
            await asyncio.sleep(0.01)
        answer = await front.post(GENERATE, GOOD)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error == "UNAVAILABLE: 1 requests are running; retry in 1 s"
        others = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(3)]
        answer = await read_answer(others[-1][0])
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error == "UNAVAILABLE: 3 connections are open; retry in 1 s"
        for _, writer in [*others, (None, first)]:
            writer.close()

    limits = dataclasses.replace(FrontLimits(), connections=3, requests=1)
    with_front(test, triton=FakeTriton(act=_until_left), limits=limits)


def test_three_times_as_many_clients_as_connections_are_all_answered() -> None:
    go_on = asyncio.Event()

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(FakeTriton.answer)
        await writer.drain()

    async def test(front: Running) -> None:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await front.post(GENERATE, GOOD, "Connection: close"))
            if len(answers) == 200:  # all of them refused, as nobody else is answered before
                go_on.set()

        await asyncio.gather(*(ask() for _ in range(300)))
        assert {answer.status for answer in answers[:200]} == {503}
        assert {answer.status for answer in answers} == {200, 503}
        assert sum(answer.status == 200 for answer in answers) >= 50
        assert all(answer.status == 200 or answer.headers["retry-after"] == "1" for answer in answers)
        assert (await front.post(GENERATE, GOOD)).status == 200

    limits = dataclasses.replace(FrontLimits(), connections=100, requests=50)
    with_front(test, triton=FakeTriton(act=answer_late), limits=limits)


def test_bodies_together_are_bounded() -> None:
    async def test(front: Running) -> None:
        _, first = await asyncio.open_connection("127.0.0.1", front.port)
        for piece in (request_bytes("POST", GENERATE, "Content-Length: 1000"), b"{" + b" " * 449, b" " * 450):
            assert (await front.post(GENERATE, b" " * 200)).status == 400, "bytes that have not come are not held"
            first.write(piece)
        while (refused := await front.post(GENERATE, b" " * 200)).status != 503:  # until the first's have arrived
            await asyncio.sleep(0.01)
        assert "bodies of 1000 bytes are in flight" in refused.body.decode()
        assert (await front.post(GENERATE, GOOD)).status == 200
        first.close()

    with_front(test, limits=dataclasses.replace(FrontLimits(), held_bytes=1000))


def test_everything_but_health_needs_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key-of-twenty-chars\n")

    async def test(front: Running) -> None:
        assert (await front.send(request_bytes("GET", "/v2/health/live"))).status == 200
        answer = await front.post(GENERATE, GOOD)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (await front.post(GENERATE, GOOD, "Authorization: Bearer a-key-of-twenty-chars")).status == 200
        assert "a-key-of-twenty-chars" not in front.triton.heads[-1]

    with_front(test, keys=read_keys(file))


async def accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def test_a_stopped_front_finishes_what_runs() -> None:
    go_on = asyncio.Event()

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(FakeTriton.answer)
        await writer.drain()

    async def test(front: Running) -> None:
        _, idle = await asyncio.open_connection("127.0.0.1", front.port)
        _, unread = await asyncio.open_connection("127.0.0.1", front.port)
        unread.write(request_bytes("POST", GENERATE, "Content-Length: 100") + b"{")
        half_reader, half = await asyncio.open_connection("127.0.0.1", front.port)
        half.write(post_bytes(GENERATE, GOOD)[:-1])
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(post_bytes(GENERATE, GOOD))
        while not front.triton.bodies:
            await asyncio.sleep(0.01)
        front.front.stop()
        half.write(GOOD[-1:])
        await asyncio.sleep(0.05)
        while await accepts(front.port):
            await asyncio.sleep(0.01)
        while len(front.triton.bodies) < 2:
            await asyncio.sleep(0.01)
        go_on.set()
        for each in (reader, half_reader):
            assert json.loads((await read_answer(each)).body) == {"ok": True}
        await asyncio.wait_for(asyncio.shield(front.serving), PATIENCE)  # not for what is unread
        for one in (idle, writer, unread, half):
            one.close()

    limits = dataclasses.replace(FrontLimits(), body_seconds=9 * PATIENCE)
    with_front(test, triton=FakeTriton(act=act), limits=limits)
