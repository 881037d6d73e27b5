"""Prompts for measuring: as long as was asked for, and never alike at their start."""

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.formats.tokenizer import load_tokenizer
from trtforge.serve.bench_prompts import BenchPrompts

TOKENIZER = DEMO_MODEL / "tokenizer.json"


class Server:
    """Counts tokens as a server of the demo model that adds a begin-of-text token."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._tokenizer = load_tokenizer(TOKENIZER)

    def __call__(self, text: str) -> int:
        """The tokens of a text."""
        self.asked.append(len(self._tokenizer.encode(text, add_special_tokens=False).ids) + 1)
        return self.asked[-1]


@pytest.mark.parametrize("wanted", [9, 128, 900])
def test_with_the_tokenizer_every_prompt_has_the_tokens_asked_for(wanted: int) -> None:
    server = Server()
    prompts = BenchPrompts(wanted, TOKENIZER, server)
    assert len(server.asked) == 1
    assert {server(prompts.next()) for _ in range(12)} == {wanted}


@pytest.mark.parametrize("wanted", [40, 128, 900])
def test_without_it_prompts_are_as_long_as_the_server_counts(wanted: int) -> None:
    server = Server()
    prompts = BenchPrompts(wanted, None, server)
    assert len(server.asked) <= 5
    assert max(server.asked) <= wanted + max(5, wanted // 100)
    lengths = [server(prompts.next()) for _ in range(24)]
    assert sum(lengths) / len(lengths) == pytest.approx(wanted, rel=0.01, abs=5)
    assert max(lengths) - min(lengths) <= 5


def test_a_server_that_does_not_count_gets_seven_words_for_ten_tokens() -> None:
    assert len(BenchPrompts(50, None, lambda text: None).next().split()) == 1 + 35


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_no_two_prompts_begin_alike(tokenizer: object) -> None:
    prompts = BenchPrompts(50, TOKENIZER if tokenizer else None, Server())
    assert len({prompts.next()[:5] for _ in range(300)}) == 300


def test_a_long_prompt_goes_on_from_the_start_of_the_text() -> None:
    assert len(BenchPrompts(500_000, None, lambda text: None).next().split()) == 1 + 350_000


def test_very_short_prompts_have_at_least_a_character() -> None:
    prompts = BenchPrompts(1, TOKENIZER, Server())
    assert all(prompts.next() for _ in range(3))
