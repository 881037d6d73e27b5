"""A queue that is really full, over the real Triton server: OpenAI's client raises RateLimitError, and comes again."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
from openai import OpenAI

from tests.assault.repositories import build
from tests.assault.server import Server, serving
from tests.patience import PATIENCE, eventually

MESSAGES = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for two requests: one that runs, one that waits."""
    small = ("engine.max_batch_size=1", "serving.max_queue_size=1", "engine.max_seq_len=2048")  # long answers
    with serving(build("demo-fp32", tmp_path_factory.mktemp("full"), *small)) as running:
        assert eventually(lambda: len(running.output) > 1)
        yield running


def address(server: Server) -> str:
    """The base URL for OpenAI's clients."""
    return server.output[1].removeprefix("openai=")


def client(server: Server, retries: int = 0) -> OpenAI:
    """OpenAI's own client."""
    return OpenAI(base_url=address(server), api_key="none", max_retries=retries, timeout=PATIENCE)


@contextmanager
def full(server: Server) -> Iterator[None]:
    """Two clients, whose answers do not end, hold all the room meanwhile."""
    port = int(address(server).rsplit(":", 1)[1].split("/")[0])
    values = {"model": "ensemble", "prompt": "Return the", "max_tokens": 100_000, "stream": True}
    body = json.dumps({**values, "logit_bias": {"1": -100, "3": -100}})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

    def held() -> tuple[int, int]:
        gauges = server.gauges()
        assert gauges is not None
        return gauges.active, gauges.waiting

    with socket.create_connection(("127.0.0.1", port)) as one, socket.create_connection(("127.0.0.1", port)) as other:
        for each in (one, other):
            each.sendall((head + body).encode())
        assert eventually(lambda: held() == (2, 1)), held()
        yield
    assert eventually(lambda: held() == (0, 0)), held()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_full_queue_is_a_rate_limit(server: Server, path: str, stream: bool) -> None:
    prompt = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": "Return"}
    body = {"model": "ensemble", "max_tokens": 4, "stream": stream, **prompt}
    with full(server):
        response = httpx.post(f"{address(server)}/{path}", json=body, timeout=PATIENCE)
        assert (response.status_code, response.headers["content-type"]) == (429, "application/json")
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
        assert error["message"].startswith(
            "the queue is full: 2 sequences run or wait, at most 2 may (max_batch_size 1 + max_queue_size 1); retry in "
        )
        assert int(response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError) as caught:
            client(server).post(f"/{path}", body=body, cast_to=object)
        assert (caught.value.status_code, caught.value.code) == (429, "rate_limit_exceeded")
    assert httpx.post(f"{address(server)}/{path}", json=body, timeout=PATIENCE).status_code == 200


def test_the_client_comes_again_and_gets_its_answer(server: Server) -> None:
    def ask() -> str:
        answer = client(server, retries=20).completions.create(
            model="ensemble", prompt="Return the number of", max_tokens=4, temperature=0
        )
        return answer.choices[0].text

    def refusals() -> float:
        text = httpx.get(f"{address(server).removesuffix('/v1')}/metrics", timeout=PATIENCE).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if '"429"' in line)

    with ThreadPoolExecutor(1) as pool:
        with full(server):
            before = refusals()
            answer = pool.submit(ask)
            assert eventually(lambda: refusals() > before)
        assert answer.result() == ask() != ""
