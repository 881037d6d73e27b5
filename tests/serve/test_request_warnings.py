"""What a request asks for without effect is said; what an answer does not show too."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from trtforge.core.errors import ForgeError
from trtforge.serve.client import Sampling, generate
from trtforge.serve.request import Generated, answer_warnings, request_warnings


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(), []),
        (Sampling(temperature=0.7), ["temperature 0.7 has no effect without top-k or top-p"]),
        (Sampling(temperature=0.7, top_p=0.9), []),
        (Sampling(temperature=0.7, top_k=4), []),
        (Sampling(temperature=0.0), []),
        (Sampling(stop=("\n", "end")), []),
        (Sampling(stop=("", "end")), ["an empty stop word never matches"]),
    ],
)
def test_options_without_effect_are_named(sampling: Sampling, said: list[str]) -> None:
    found = request_warnings(sampling)
    assert len(found) == len(said)
    assert all(words in text for words, text in zip(said, found, strict=True))


def test_an_answer_that_was_cut_is_said() -> None:
    asked = Sampling(max_tokens=100)

    def answer(count: int | None, reason: str | None, prompt: int | None = 28) -> Generated:
        return Generated("", prompt, count, 1.0, 1.0, reason)

    assert answer_warnings(asked, answer(4, "length")) == (
        "the answer was cut after 4 of 100 tokens by the engine's max_seq_len, which prompt and answer reach at 32",
    )
    assert answer_warnings(asked, answer(4, "length", None)) == (
        "the answer was cut after 4 of 100 tokens by the engine's max_seq_len",
    )
    for fine in (answer(100, "length"), answer(4, "stop"), answer(4, None), answer(None, "length")):
        assert answer_warnings(asked, fine) == ()


class _Model(BaseHTTPRequestHandler):
    """A text model with some inputs; it refuses others, as Triton does."""

    inputs: frozenset[str] = frozenset()

    def do_GET(self) -> None:
        self._send({"name": "ensemble", "inputs": [{"name": name} for name in sorted(self.inputs)]})

    def do_POST(self) -> None:
        asked = set(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if asked - self.inputs:
            self._send({"error": f"unexpected inference input '{min(asked - self.inputs)}' for model 'ensemble'"})
            return
        reason = {"finish_reason": "length"} if "return_finish_reason" in asked else {}
        counts = {"num_output_tokens": 2} if "return_num_output_tokens" in asked else {}
        self._send({"text_output": "one"} | reason | counts)

    def _send(self, values: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(values).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


TEXT = frozenset({"text_input", "max_tokens", "stream"})
COUNTS = frozenset({"return_num_input_tokens", "return_num_output_tokens"})


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (TEXT | COUNTS | {"return_finish_reason"}, (2, "length")),
        (TEXT | COUNTS, (2, None)),  # a repository of an older trtforge
        (TEXT, (None, None)),  # NVIDIA's
    ],
)
def test_only_what_a_repository_can_tell_is_asked_for(
    server: str, monkeypatch: pytest.MonkeyPatch, inputs: frozenset[str], expected: tuple[int | None, str | None]
) -> None:
    monkeypatch.setattr(_Model, "inputs", inputs)
    found = generate(server, "ensemble", "a", Sampling(finish_reason=True), protocol="http")
    assert (found.output_tokens, found.finish_reason) == expected


def test_an_option_that_a_repository_does_not_have_is_refused(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Model, "inputs", TEXT)
    with pytest.raises(ForgeError, match="unexpected inference input 'top_k'"):
        generate(server, "ensemble", "a", Sampling(top_k=3, finish_reason=True), protocol="http")
