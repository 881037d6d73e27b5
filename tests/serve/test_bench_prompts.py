"""Prompts for measuring: as long as was asked for, and never alike at their start."""

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.formats.tokenizer import load_tokenizer
from trtforge.serve.bench_prompts import BenchPrompts

TOKENIZER = DEMO_MODEL / "tokenizer.json"


def tokens(text: str) -> int:
    """Tokens that the demo model's server counts, with the begin-of-text token that others add."""
    return len(load_tokenizer(TOKENIZER).encode(text, add_special_tokens=False).ids) + 1


def learnt(prompts: BenchPrompts) -> BenchPrompts:
    first = prompts.first()
    prompts.learn(first, tokens(first))
    return prompts


@pytest.mark.parametrize("wanted", [9, 128, 900])
def test_with_the_tokenizer_every_prompt_has_the_tokens_asked_for(wanted: int) -> None:
    prompts = learnt(BenchPrompts(wanted, TOKENIZER))
    assert {tokens(prompts.next()) for _ in range(12)} == {wanted}


def test_without_it_prompts_are_as_long_as_the_server_counted() -> None:
    prompts = BenchPrompts(900)
    assert tokens(prompts.first()) < 900
    lengths = [tokens(learnt(prompts).next()) for _ in range(8)]
    assert sum(lengths) / len(lengths) == pytest.approx(900, rel=0.1)


def test_a_server_that_does_not_count_gets_four_characters_for_a_token() -> None:
    prompts = BenchPrompts(50)
    prompts.learn(prompts.first(), None)
    assert len(prompts.next()) == 200


def test_no_two_prompts_begin_alike() -> None:
    prompts = BenchPrompts(50)
    assert len({prompts.next()[:5] for _ in range(500)}) == 500
    assert len(BenchPrompts(250_000).next()) == 1_000_000


def test_very_short_prompts_have_at_least_a_character() -> None:
    prompts = learnt(BenchPrompts(1, TOKENIZER))
    assert all(prompts.next() for _ in range(3))
