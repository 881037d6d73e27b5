"""The speed of a text model in the real Triton server, whose engine gives a token every few milliseconds."""

import time
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.serve.conftest import Running
from trtforge.core.errors import ForgeError
from trtforge.serve.request import Generated, Sampling
from trtforge.serve.speed import Load, Meter, Speed, measure, requests_of


def test_every_answer_counts_at_each_level(server: Running) -> None:
    done: list[int] = []
    load = Load(concurrency=(1, 6), requests=3, prompt_tokens=16, max_tokens=20)
    found = measure(server.grpc, "ensemble", load, DEMO_MODEL / "tokenizer.json", done=lambda: done.append(1))
    assert isinstance(found, Speed)
    assert [(level.concurrency, level.requests, level.tokens) for level in found.levels] == [(1, 3, 60), (6, 6, 120)]
    assert len(done) == requests_of(load) == 10
    assert found.answer_tokens == 20
    assert found.prompt_tokens == 16
    for level in found.levels:
        assert level.tokens_per_second == pytest.approx(level.tokens / level.seconds, rel=0.01)
        longest = level.seconds * level.concurrency / level.requests
        assert 0 < level.first_text_ms / 1e3 < longest + 1
        assert level.next_token_ms > 0
    alone, together = found.levels
    assert together.tokens_per_second > alone.tokens_per_second


def test_a_level_that_is_not_over_in_time_does_not_count(server: Running) -> None:
    meter = Meter(server.grpc, "ensemble", Load(requests=2, prompt_tokens=8, max_tokens=2))
    assert meter.answers(2, until=time.monotonic() - 1) is None
    whole = meter.answers(2, until=time.monotonic() + 600)
    assert whole is not None
    assert whole.output_tokens == (2, 2)
    assert all(first <= answer for first, answer in zip(whole.first_text_ms, whole.answer_ms, strict=True))


def test_without_a_tokenizer_the_length_follows_from_what_the_server_counts(server: Running) -> None:
    load = Load(concurrency=(2,), requests=4, prompt_tokens=120, max_tokens=4)
    assert 116 <= measure(server.grpc, "ensemble", load).prompt_tokens <= 124


def test_a_refusal_ends_the_measurement(server: Running) -> None:
    with pytest.raises(ForgeError, match="200 fit") as caught:
        measure(server.grpc, "ensemble", Load(concurrency=(1,), requests=1, prompt_tokens=1000))
    assert caught.value.hint == "The requests are of --prompt-tokens 1000 and --max-tokens 64: choose smaller ones."
    with pytest.raises(ForgeError, match=r"no server answers at 127\.0\.0\.1:1"):
        measure("127.0.0.1:1", "ensemble", Load())


def test_answers_of_another_length_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's max_seq_len ends them."""

    def generate(url: str, model: str, prompt: str, sampling: Sampling, **_: Any) -> Generated:
        return Generated("a", 190, min(sampling.max_tokens, 8), 0.5, 0.1)

    monkeypatch.setattr("trtforge.serve.speed.generate", generate)
    load = Load(concurrency=(1,), requests=1, prompt_tokens=190, max_tokens=400)
    with pytest.raises(ForgeError, match="the server ends answers of 400 tokens after 8") as caught:
        measure("127.0.0.1:9", "ensemble", load, DEMO_MODEL / "tokenizer.json")
    assert caught.value.hint == "The requests are of --prompt-tokens 190 and --max-tokens 400: choose smaller ones."
    assert measure("", "", load.model_copy(update={"max_tokens": 8}), DEMO_MODEL / "tokenizer.json").answer_tokens == 8
