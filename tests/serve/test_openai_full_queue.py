"""A queue that is really full, over the real Triton server: OpenAI's client raises RateLimitError, and comes again."""

import threading
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


def client(server: Server, retries: int = 0, http_client: httpx.Client | None = None) -> OpenAI:
    """OpenAI's own client."""
    return OpenAI(
        base_url=address(server), api_key="none", max_retries=retries, timeout=PATIENCE, http_client=http_client
    )


def hold(server: Server, ended: threading.Event) -> None:
    """Ask for one long answer after the other until `ended` is set: a busy machine may take longer than one of them."""
    body = {"model": "ensemble", "prompt": "Return the", "max_tokens": 100_000, "stream": True}
    body |= {"logit_bias": {"1": -100, "3": -100}}  # it goes on until max_seq_len
    while not ended.is_set():
        with httpx.stream("POST", f"{address(server)}/completions", json=body, timeout=PATIENCE) as response:
            for _ in response.iter_raw():
                if ended.is_set():
                    return


@contextmanager
def full(server: Server) -> Iterator[None]:
    """Two clients hold all the room meanwhile, but for the moments between two of their answers."""

    def held() -> tuple[int, int]:
        gauges = server.gauges()
        assert gauges is not None
        return gauges.active, gauges.waiting

    ended = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        holders = [pool.submit(hold, server, ended) for _ in range(2)]
        try:
            assert eventually(lambda: held() == (2, 1)), held()
            yield
        finally:
            ended.set()
    for holder in holders:
        holder.result()
    assert eventually(lambda: held() == (0, 0)), held()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
        ("completions", {"prompt": "Return", "max_tokens": 4}),
        ("responses", {"input": MESSAGES, "max_output_tokens": 4}),
    ],
)
def test_a_full_queue_is_a_rate_limit(server: Server, path: str, prompt: dict[str, object], stream: bool) -> None:
    body = {"model": "ensemble", "stream": stream, **prompt}
    answers: list[httpx.Response] = []
    codes: list[tuple[int, str | None]] = []

    def refused() -> bool:
        answers.append(httpx.post(f"{address(server)}/{path}", json=body, timeout=PATIENCE))
        return answers[-1].status_code != 200

    def raised() -> bool:
        try:
            client(server).post(f"/{path}", body=body, cast_to=object)
        except openai.RateLimitError as caught:
            codes.append((caught.status_code, caught.code))
        return bool(codes)

    with full(server):
        assert eventually(refused)
        assert eventually(raised)
    assert codes == [(429, "rate_limit_exceeded")]
    response = answers[-1]
    assert (response.status_code, response.headers["content-type"]) == (429, "application/json")
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    assert error["message"].startswith(
        "the queue is full: 2 sequences run or wait, at most 2 may (max_batch_size 1 + max_queue_size 1); retry in "
    )
    assert int(response.headers["retry-after"]) >= 1
    assert httpx.post(f"{address(server)}/{path}", json=body, timeout=PATIENCE).status_code == 200


def test_the_client_comes_again_and_gets_its_answer(server: Server) -> None:
    def ask(statuses: list[int]) -> str:
        hooks = {"response": [lambda response: statuses.append(response.status_code)]}
        with httpx.Client(event_hooks=hooks, timeout=PATIENCE) as http:
            answer = client(server, retries=20, http_client=http).completions.create(
                model="ensemble", prompt="Return the number of", max_tokens=4, temperature=0
            )
        return answer.choices[0].text

    statuses: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        with full(server):
            while statuses[:1] != [429]:  # else it came between two answers
                statuses.clear()
                answer = pool.submit(ask, statuses)
                assert eventually(lambda: bool(statuses))
        assert answer.result() == ask([]) != ""
    assert (statuses[0], statuses[-1]) == (429, 200)
