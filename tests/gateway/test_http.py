"""The edges of HTTP: errors as OpenAI's client classes, limits, keys, clients that leave."""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import Counter
from uvicorn.server import ServerState

from tests.gateway.fake import FakeBackend
from tests.gateway.support import Gateway, running
from tests.patience import PATIENCE, eventually
from trtforge.core.api_keys import ApiKeys
from trtforge.core.host_check import HostCheck
from trtforge.gateway import service
from trtforge.gateway.backend import GONE, BackendError
from trtforge.gateway.fields import read_body
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.protocol import BoundedProtocol

KEY = "a-key-of-this-test-0123"
USER = {"role": "user", "content": "one two three"}
FULL = BackendError("UNAVAILABLE: the queue is full; retry in 4 s", "UNAVAILABLE")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with running([FakeBackend()]) as found:
        yield found


def client(gateway: Gateway, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url, api_key=key, max_retries=0, timeout=PATIENCE)


def ask(gateway: Gateway, key: str = "none", *, model: str = "ensemble", stream: bool = False) -> object:
    answer = client(gateway, key).completions.create(model=model, prompt="one two", stream=stream)
    return list(answer) if stream else answer  # type: ignore[call-overload]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (BackendError("INVALID_ARGUMENT: no", "INVALID_ARGUMENT"), openai.BadRequestError, None),
        (FULL, openai.RateLimitError, "rate_limit_exceeded"),
        (BackendError("UNAVAILABLE: stopping", "UNAVAILABLE"), openai.InternalServerError, "server_unavailable"),
        (BackendError("the model server cannot be reached", GONE), openai.InternalServerError, "server_unavailable"),
        (BackendError("INTERNAL: broken", "INTERNAL"), openai.InternalServerError, None),
    ],
)  # fmt: skip
def test_errors_become_the_clients_classes(
    error: BackendError, expected: type[openai.APIStatusError], code: str | None, stream: bool
) -> None:
    with running([FakeBackend(error=error)]) as gateway, pytest.raises(expected) as caught:
        ask(gateway, stream=stream)
    assert caught.value.code == code
    if expected is openai.RateLimitError:
        assert caught.value.response.headers["retry-after"] == "4"


def test_an_error_in_the_middle_of_a_stream_is_raised_there() -> None:
    fake = FakeBackend(error=BackendError("UNAVAILABLE: the server is ending: why", "UNAVAILABLE"), error_at=1)
    with running([fake]) as gateway:
        stream = client(gateway).completions.create(model="ensemble", prompt="one two", stream=True)
        assert next(stream).choices[0].text == "one"
        with pytest.raises(openai.APIError, match="the server is ending: why"):
            next(stream)


def connected(gateway: Gateway) -> socket.socket:
    """A connection of its own."""
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE)


def request_bytes(body: str) -> bytes:
    """A request for completions as it is sent."""
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_an_unknown_model_is_not_found(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(gateway, model="gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_wrong_field_is_named(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client(gateway).chat.completions.create(model="ensemble", messages=[USER], temperature=5)  # type: ignore[list-item]
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


def test_keys_are_required_for_everything_but_health() -> None:
    with running([FakeBackend()], keys=ApiKeys((KEY,))) as gateway:
        for wrong in ("none", KEY + "x"):
            with pytest.raises(openai.AuthenticationError) as caught:
                ask(gateway, wrong)
            assert caught.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                client(gateway, wrong).models.list()
        assert ask(gateway, KEY)
        assert [model.id for model in client(gateway, KEY).models.list()] == ["ensemble"]
        assert httpx.get(f"{gateway.root}/health", timeout=PATIENCE).status_code == 200
        assert httpx.get(f"{gateway.url}/models", headers={"x-api-key": KEY}, timeout=PATIENCE).status_code == 200


LOCAL = HostCheck.of("127.0.0.1", ("llm.example",), with_keys=False)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example", "origin": "http://evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null", "content-type": "text/plain"},
    ],
)
def test_web_pages_of_others_reach_no_gateway_on_loopback_without_keys(headers: dict[str, str]) -> None:
    fake = FakeBackend()
    body = '{"model":"ensemble","prompt":"a","max_tokens":1}'
    with running([fake], hosts=LOCAL) as gateway:
        answers = [
            httpx.post(f"{gateway.url}/completions", content=body, headers=headers, timeout=PATIENCE),
            httpx.get(f"{gateway.url}/models", headers=headers, timeout=PATIENCE),
            httpx.get(f"{gateway.root}/metrics", headers=headers, timeout=PATIENCE),
        ]
        assert httpx.get(f"{gateway.root}/health", headers=headers, timeout=PATIENCE).status_code == 200
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (403, "request_forbidden", "host_not_allowed")
        assert "not allowed: this server listens on loopback without API keys" in error["message"]
        assert "access-control-allow-origin" not in answer.headers
    assert fake.requests == []


def test_clients_of_this_machine_and_allowed_names_reach_it() -> None:
    with running([FakeBackend()], hosts=LOCAL) as gateway:
        assert ask(gateway)
        for host in (f"localhost:{gateway.port}", "[::1]:1", "llm.example"):
            assert gateway_models(gateway, host=host).status_code == 200
            assert gateway_models(gateway, host=host, origin="http://localhost:3000").status_code == 200
        with connected(gateway) as old:
            old.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
            assert old.recv(4096).startswith(b"HTTP/1.1 200")


def gateway_models(gateway: Gateway, **headers: str) -> httpx.Response:
    """The models as a client with these headers gets them."""
    return httpx.get(f"{gateway.url}/models", headers=headers, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "no body"),
        (b"{", 400, "not JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b"[" * 100_000, 400, "nested more than 64 deep"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "nested more than 64 deep"),
        (b'{"prompt":"a","prompt":"b"}', 400, "'prompt' occurs twice"),
        (b'{"model":"\xff"}', 400, "UTF-8"),
        (b'{"model":"ensemble","prompt":"\\ud800"}', 400, "lone surrogate"),
        (b'{"n":' + b"9" * 5000 + b"}", 400, "5,000 digits"),
        (b" " * 5_000_000, 413, "larger than"),
    ],
)
def test_hostile_bodies_are_refused(gateway: Gateway, body: bytes, status: int, said: str) -> None:
    for path in ("chat/completions", "completions", "responses"):
        response = gateway.post(path, content=body)
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert said in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_are_finite(gateway: Gateway, number: str) -> None:
    response = gateway.post("completions", content=f'{{"model":"ensemble","prompt":"a","temperature":{number}}}')
    assert response.status_code == 400
    assert f"the body: {number} is not a finite number" in response.json()["error"]["message"]


@pytest.mark.parametrize("length", ["10000", "0010000", None])
def test_bodies_together_are_bounded(length: str | None) -> None:
    """By the bytes that have come: those that are declared take no memory."""
    limits = GatewayLimits(held_bytes=10_000)
    with running([FakeBackend()], limits=limits) as gateway, connected(gateway) as first:
        declared = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        first.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{declared}\r\n\r\n".encode())
        body = b"{" + b" " * 8999

        def answer() -> httpx.Response:
            return httpx.post(f"{gateway.url}/completions", content=b" " * 2000, timeout=PATIENCE)

        assert answer().status_code == 400
        first.sendall(body if length is not None else b"2328\r\n" + body + b"\r\n")
        assert eventually(lambda: answer().status_code == 429)
        assert "bodies of 10000 bytes are in flight" in answer().json()["error"]["message"]
        assert ask(gateway), "what is small enough is answered"
        first.close()
        assert eventually(lambda: answer().status_code == 400)


def test_values_of_bodies_count_as_memory() -> None:
    """A token id takes two bytes of a body, and 32 of memory."""
    with running([FakeBackend()], limits=GatewayLimits(held_bytes=100_000)) as gateway:

        def answer(tokens: int) -> httpx.Response:
            return gateway.post("completions", model="ensemble", prompt=[1] * tokens)

        assert answer(2000).status_code == 200
        refused = answer(4000)
        assert refused.status_code == 429
        assert "bodies of 100000 bytes are in flight" in refused.json()["error"]["message"]
        assert answer(2000).status_code == 200


def test_large_bodies_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def recorded(body: bytes, limits: GatewayLimits) -> Mapping[str, Any]:
        threads.append(threading.current_thread().name)
        return read_body(body, limits)

    monkeypatch.setattr(service, "read_body", recorded)
    with running([FakeBackend()]) as gateway:
        for size in (10, 200_000):
            messages = [{"role": "user", "content": "a" * size}]
            assert gateway.post("chat/completions", model="ensemble", messages=messages).status_code == 200
        wrong = gateway.post("chat/completions", content="{" + " " * 200_000)
    assert wrong.status_code == 400
    assert "the body" in wrong.json()["error"]["message"]
    assert [name.startswith("reader") for name in threads] == [False, True, True]


def test_a_body_without_declared_length_is_bounded_too() -> None:
    with running([FakeBackend()], limits=GatewayLimits(body_bytes=1000)) as gateway:
        response = httpx.post(f"{gateway.url}/completions", content=iter([b"x" * 600] * 2), timeout=PATIENCE)
        assert response.status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with running([FakeBackend()], limits=GatewayLimits(body_seconds=0.1)) as gateway, connected(gateway) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in slow.recv(4096)


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("begun", [b"", b"GET /health"])
def test_headers_that_do_not_come_are_not_waited_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, first: bytes, begun: bytes
) -> None:
    if first and not begun:
        begun = b"G"  # an idle connection after a request is kept for a minute
    if not first:
        monkeypatch.setattr("trtforge.gateway.protocol.HEAD_SECONDS", 0.1)
    with connected(gateway) as slow:
        if first:
            slow.sendall(first)
            assert slow.recv(4096).startswith(b"HTTP/1.1 200")
            monkeypatch.setattr("trtforge.gateway.protocol.HEAD_SECONDS", 0.1)
        slow.sendall(begun)
        while slow.recv(4096):
            pass


def test_compressed_bodies_are_refused(gateway: Gateway) -> None:
    response = httpx.post(
        f"{gateway.url}/completions", content=b"x", headers={"content-encoding": "gzip"}, timeout=PATIENCE
    )
    assert response.status_code == 415


@pytest.mark.parametrize(("size", "status"), [(60_000, 200), (70_000, 431), (200_000, 431)])
def test_headers_that_come_whole_have_a_limit_too(gateway: Gateway, size: int, status: int) -> None:
    with connected(gateway) as client:
        client.sendall(f"GET /health HTTP/1.1\r\nHost: a\r\nX: {'a' * size}\r\nConnection: close\r\n\r\n".encode())
        try:
            head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
        except ConnectionResetError:  # the gateway had not read all when it closed
            assert status == 431
            return
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert status == 200 or json.loads(body)["error"]["message"] == "the headers of the request are too large"


@pytest.mark.parametrize("path", ["health", "health/ready"])
def test_probes_may_ask_for_the_head_alone(gateway: Gateway, path: str) -> None:
    answer = httpx.head(f"{gateway.root}/{path}", timeout=PATIENCE)
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_path_with_a_slash_at_its_end_is_another_one(gateway: Gateway) -> None:
    answer = httpx.post(f"{gateway.url}/chat/completions/", json={}, timeout=PATIENCE)
    assert answer.status_code == 404
    assert "there is no POST /v1/chat/completions/" in answer.json()["error"]["message"]


def test_what_is_no_http_gets_an_error_of_openais_form(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with connected(gateway) as garbage:
        garbage.sendall(b"\x16\x03\x01\r\n\r\n")
        head, _, body = garbage.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["message"] == "the request is not HTTP/1.1: illegal request line"
    with connected(gateway) as refused:
        refused.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Encoding: a\r\n\r\n"
        )
        assert refused.recv(4096).startswith(b"HTTP/1.1 415 ")
        refused.sendall(b"no chunk\r\n")
        while refused.recv(4096):
            pass
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_more_connections_than_allowed_are_told_to_come_later() -> None:
    with running([FakeBackend()], connections=2) as gateway:
        idle = [connected(gateway), connected(gateway)]
        assert eventually(lambda: len(gateway.connections) == 2)
        with pytest.raises(openai.InternalServerError) as caught:
            ask(gateway)
        assert (caught.value.status_code, caught.value.code) == (503, "server_unavailable")
        assert "2 connections are open; retry in 1 s" in str(caught.value)
        headers = caught.value.response.headers
        assert (headers["retry-after"], headers["connection"]) == ("1", "close")
        with connected(gateway) as beyond:  # probes must not take the server for dead, nor clients that came before
            for one in (beyond, idle[0]):
                one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answered = beyond.makefile("rb").read()  # to the end: it is closed then
            assert answered.startswith(b"HTTP/1.1 200 ")
            assert answered.count(b"HTTP/1.1 ") == 1
            assert idle[0].recv(4096).startswith(b"HTTP/1.1 200 ")
            idle[1].sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle[1].recv(4096).startswith(b"HTTP/1.1 200 ")
        with connected(gateway) as silent:
            assert silent.recv(1) == b"", "it is closed soon"
        for each in idle:
            each.close()
        assert eventually(lambda: not gateway.connections)
        assert ask(gateway)


def test_a_body_with_a_length_and_chunks_is_refused(gateway: Gateway) -> None:
    """What follows it may be another request or its body, depending on who reads it (RFC 9112, 6.1)."""
    with connected(gateway) as one:
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        answered = one.makefile("rb").read()
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert answered.count(b"HTTP/1.1 ") == 1
    assert b"Content-Length and Transfer-Encoding exclude each other" in answered


def test_headers_that_are_too_large_are_said(gateway: Gateway) -> None:
    with connected(gateway) as large:
        large.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000)
        head, _, body = large.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    error = json.loads(body)["error"]
    assert (error["message"], error["type"]) == ("the headers of the request are too large", "invalid_request_error")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404)]
)
def test_unknown_endpoints_have_errors_of_openais_form(gateway: Gateway, method: str, path: str, status: int) -> None:
    response = httpx.request(method, gateway.root + path, timeout=PATIENCE)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_more_requests_than_allowed_are_told_to_come_later() -> None:
    fake = FakeBackend(held=True)
    with running([fake], limits=GatewayLimits(requests=2)) as gateway, ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(ask, gateway) for _ in range(2)]
        assert eventually(lambda: fake.running == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            ask(gateway)
        assert caught.value.response.headers["retry-after"] == "1"
        fake.held = False
        assert all(each.result() for each in busy)
        assert ask(gateway)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_cancels_its_requests(stream: bool, prompts: int) -> None:
    fake = FakeBackend(delay=3600)
    body = json.dumps({"model": "ensemble", "prompt": ["one two"] * prompts, "max_tokens": 100, "stream": stream})
    with running([fake]) as gateway:
        with connected(gateway) as leaving:
            leaving.sendall(request_bytes(body))
            assert eventually(lambda: fake.running == prompts)
        assert eventually(lambda: fake.running == 0)
        assert fake.cancelled == prompts
        figures = httpx.get(f"{gateway.root}/metrics", timeout=PATIENCE).text
        assert 'trtforge_gateway_requests_total{endpoint="completions",status="499"} 1.0' in figures


def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels_it() -> None:
    fake = FakeBackend(delay=0.02)
    with running([fake]) as gateway:
        stream = client(gateway).completions.create(model="ensemble", prompt="a b", max_tokens=1000, stream=True)
        next(stream)
        stream.close()
        assert eventually(lambda: fake.running == 0)
        metrics = gateway.service.metrics
        assert eventually(lambda: value(metrics.prompt_tokens) == 2)
        assert 1 <= value(metrics.completion_tokens) < 1000
    assert fake.cancelled == 1


def value(counter: Counter) -> float:
    (metric,) = counter.collect()
    return metric.samples[0].value


def test_a_client_that_does_not_read_is_given_up() -> None:
    fake = FakeBackend(words=("x" * 1_000_000,) * 100)
    body = '{"model":"ensemble","prompt":"a","max_tokens":100,"stream":true}'
    with running([fake], limits=GatewayLimits(stalled_seconds=0.2)) as gateway, connected(gateway) as stalled:
        stalled.sendall(request_bytes(body))
        assert eventually(lambda: fake.cancelled == 1)


@pytest.mark.parametrize("stream", ["false", "true"])
def test_the_connection_of_a_client_that_does_not_read_ends(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.gateway.protocol.UNREAD_SECONDS", 0.2)
    fake = FakeBackend(words=("x" * 1_000_000,) * 20)
    body = f'{{"model":"ensemble","prompt":"a","max_tokens":20,"stream":{stream}}}'
    with running([fake]) as gateway, connected(gateway) as stalled:
        stalled.sendall(request_bytes(body))
        assert eventually(lambda: len(fake.requests) == 1)
        assert eventually(lambda: not gateway.connections)


def test_a_closing_connection_waits_for_a_slow_reader_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.gateway.protocol.UNREAD_SECONDS", 0.05)

    class Transport(asyncio.Transport):
        closing = aborted = False

        def is_closing(self) -> bool:
            return self.closing

        def abort(self) -> None:
            self.aborted = True

    async def aborted(*, closing: bool) -> bool:
        protocol = BoundedProtocol(uvicorn.Config(lambda: None, log_config=None), ServerState(), {})
        protocol.connection_made(transport := Transport())
        transport.closing = closing
        protocol.on_response_complete()
        await asyncio.sleep(0.1)
        return transport.aborted

    assert asyncio.run(aborted(closing=True))
    assert not asyncio.run(aborted(closing=False))


def test_a_bug_is_an_error_without_the_text_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeBackend(error=KeyError("a secret prompt"))  # type: ignore[arg-type]
    with (
        caplog.at_level(logging.DEBUG),
        running([fake]) as gateway,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        ask(gateway)
    assert "the gateway failed" in str(caught.value)
    assert "KeyError at fake.py" in caplog.text
    assert "secret" not in caplog.text
