"""The front before a stand-in for Triton that is gone, late, breaks off or answers with an error."""

import asyncio
import dataclasses

from tests.serve.front.support import GENERATE, STREAM, FakeTriton, Running, request_bytes
from tests.serve.front.test_front import EVENT, GOOD, SSE, chunk, with_front
from trtforge.serve.front.limits import FrontLimits


def test_without_triton_the_answer_is_503() -> None:
    async def test(front: Running) -> None:
        answer = await front.send(request_bytes("GET", "/v2/health/ready"))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error.startswith("UNAVAILABLE: the server is starting, stopping or gone")

    with_front(test, upstream=False)


def test_an_answer_that_never_comes_is_502() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def test(front: Running) -> None:
        assert (await front.post(GENERATE, GOOD)).status == 502

    with_front(test, triton=FakeTriton(act=close))


def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + chunk(EVENT))
        await writer.drain()

    async def test(front: Running) -> None:
        answer = await front.post(STREAM, GOOD)
        assert answer.status == 200
        assert answer.body == EVENT + b'data: {"error":"UNAVAILABLE: the server ended during the answer"}\n\n'

    with_front(test, triton=FakeTriton(act=act))


def test_a_stream_that_begins_with_an_error_gets_its_status() -> None:
    event = b'data: {"error":"UNAVAILABLE: the queue is full; retry in 2 s"}\n\n'

    async def test(front: Running) -> None:
        answer = await front.post(STREAM, GOOD)
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        assert answer.error == "UNAVAILABLE: the queue is full; retry in 2 s"

    with_front(test, triton=FakeTriton(answer=SSE + chunk(event) + b"0\r\n\r\n"))


def test_an_error_with_status_200_gets_its_own() -> None:
    error = b'{"error":"generate expects model to produce exactly 1 response, use generate stream"}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def test(front: Running) -> None:
        answer = await front.post(GENERATE, GOOD)
        assert (answer.status, answer.error.split(",")[0]) == (
            400,
            "generate expects model to produce exactly 1 response",
        )

    with_front(test, triton=FakeTriton(answer=head + chunk(error) + b"0\r\n\r\n"))


def test_plain_endpoints_have_a_time_limit() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def test(front: Running) -> None:
        answer = await front.send(request_bytes("GET", "/v2"))
        assert (answer.status, answer.error) == (504, "no answer from the server in 0.1 s")

    with_front(test, triton=FakeTriton(act=wait), limits=dataclasses.replace(FrontLimits(), answer_seconds=0.1))
