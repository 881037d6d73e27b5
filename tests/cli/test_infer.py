"""`trtforge infer`: where it asks, where its prompt comes from, and what it warns of."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from trtforge.serve.request import Generated


class Asked:
    """Takes the place of the client: remembers the request and gives an answer."""

    def __init__(self, answer: Generated) -> None:
        self.answer = answer
        self.url, self.prompt, self.options = "", "", dict[str, Any]()
        self.sampling: Any = None

    def __call__(self, url: str, model: str, prompt: str, sampling: Any, **options: Any) -> Generated:
        self.url, self.prompt, self.options, self.sampling = url, prompt, options, sampling
        on_text: Callable[[str], None] | None = options["on_text"]
        if on_text is not None:
            on_text(self.answer.text)
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked(Generated("one two", 30, 2, 1.0, 0.5, "length"))
    monkeypatch.setattr("trtforge.serve.client.generate", found)
    return found


@pytest.mark.parametrize(
    ("words", "url", "protocol"),
    [
        ((), "127.0.0.1:8001", "grpc"),
        (("--protocol", "http"), "127.0.0.1:8000", "http"),
        (("--url", "http://gpu7:9000"), "gpu7:9000", "http"),
        (("--url", "gpu7"), "gpu7:8001", "grpc"),
    ],
)
def test_the_default_port_is_the_protocols(
    run: Any, asked: Asked, words: tuple[str, ...], url: str, protocol: str
) -> None:
    status, _, _ = run("infer", "Hello", *words)
    assert (status, asked.url, asked.options["protocol"]) == (0, url, protocol)


def test_a_prompt_comes_from_standard_input(run: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Naïve\ncafé\n".encode())))
    assert run("infer", "-")[0] == 0
    assert asked.prompt == "Naïve\ncafé\n"
    for given, said in ((b"", "standard input is empty"), (b"\xff", "standard input is not UTF-8 text")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        status, _, errors = run("infer", "-")
        assert status == 1
        assert said in errors


@pytest.mark.parametrize("words", [("\udcff",), ("x", "--stop", "\udcff")])
def test_an_argument_that_is_not_utf8_is_refused(run: Any, words: tuple[str, ...]) -> None:
    """Python makes a lone surrogate of the byte FF."""
    status, out, err = run("infer", *words)
    assert (status, out, err) == (1, "", "error: '\\\\udcff' is not UTF-8 text\nhint: Give UTF-8 text.\n")


def test_warnings_are_on_stderr_only(run: Any, asked: Asked) -> None:
    words = ("--max-tokens", "9", "--temperature", "0.7", "--stop", "\n")
    status, out, errors = run("infer", "Hello", *words)
    assert (status, out) == (0, "one two\n")
    warnings = [line for line in errors.splitlines() if line.startswith("warning: ")]
    assert [line.split()[1] for line in warnings] == ["temperature", "the"]
    assert warnings[1] == (
        "warning: the answer was cut after 2 of 9 tokens by the engine's max_seq_len, "
        "which prompt and answer reach at 32"
    )
    status, out, errors = run("infer", "Hello", "--json", *words)
    assert json.loads(out)["finish_reason"] == "length"
    assert errors.splitlines() == warnings


@pytest.mark.parametrize("words", [("infer", "Hello"), ("chat",), ("run", "x"), ("generate", "x", "Hello")])
@pytest.mark.parametrize("temperature", ["1e39", "2e30", "1e-35", "inf", "nan", "-1"])
def test_a_temperature_that_the_engine_refuses_is_refused_by_the_command(
    run: Any, asked: Asked, words: tuple[str, ...], temperature: str
) -> None:
    status, out, errors = run(*words, "--top-p", "1", "--temperature", temperature)
    assert (status, out, asked.url) == (2, "", "")
    assert errors.startswith(
        f"error: Invalid value for '--temperature': {float(temperature):g} is neither 0 nor from 1e-30"
    )
    assert "Warning" not in errors


@pytest.mark.parametrize("temperature", ["0", "1e-30", "1e30"])
def test_the_engines_own_limits_are_sent(run: Any, asked: Asked, temperature: str) -> None:
    status, _, errors = run("infer", "Hello", "--top-p", "1", "--temperature", temperature, "--max-tokens", "2")
    assert (status, "warning" in errors) == (0, False)
    assert asked.sampling.temperature == float(temperature)


def test_without_reason_nothing_is_warned_of(run: Any, asked: Asked) -> None:
    _, _, errors = run("infer", "Hello", "--max-tokens", "2", "--temperature", "0.7", "--top-p", "0.9", "--stop", "end")
    assert "warning" not in errors
