"""Malformed HTTP against the real server: each is answered with an error, and a good stream beside goes on."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from tokenizers import Tokenizer

from tests.patience import PATIENCE
from tests.serve.conftest import Running
from tests.serve.malformed import ALL, FATAL, Malformed
from tests.serve.test_serving import PROMPT, echoed
from trtforge.serve.client import Sampling, stream_text

_PATH = re.compile(r"(?<![\w.])/(?:[\w.-]+/)+[\w.-]+")
TOKENS = 400


@dataclass
class Answer:
    """A response as it came on the wire."""

    status: int
    error: str


def ask(server: Running, request: Malformed) -> Answer:
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(request.data)
        response = b""
        while b"\r\n\r\n" not in response:
            response += _more(connection)
        head, _, body = response.partition(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length")
        )
        while len(body) < length:
            body += _more(connection)
    return Answer(int(head.split()[1]), httpx.Response(200, content=body or b"{}").json().get("error", ""))


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    assert data, "the connection ended without an answer"
    return data


def test_there_are_a_hundred() -> None:
    assert len({request.data for request in ALL}) >= 100


@pytest.mark.parametrize("requests", [FATAL, ALL], ids=["fatal", "all"])
def test_malformed_requests_are_refused_and_a_stream_beside_goes_on(
    server: Running, tokenizer: Tokenizer, requests: tuple[Malformed, ...]
) -> None:
    def stream() -> str:
        return "".join(stream_text(server.http, "ensemble", PROMPT, Sampling(max_tokens=TOKENS), protocol="http"))

    triton = server.triton()
    wrong = []
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(stream)
        for request in requests:
            answer = ask(server, request)
            refused = answer.status >= 400 and bool(answer.error)
            told = _PATH.search(answer.error.replace("/v2/", ""))
            if not refused or told or request.status not in (None, answer.status):
                wrong.append((request.name, answer))
        assert good.result() == echoed(tokenizer, PROMPT, TOKENS)
    assert wrong == []
    assert server.triton() == triton
