"""Scores of prompts, biases of tokens and a decaying top_p by the Python API."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.conftest import DEMO_MODEL
from trtforge import Engine, SamplingParams, Tokens
from trtforge.core.errors import RequestError

PROMPT = "Return the number of items in the list, and a tuple of the first and the last of them"
SAMPLED = SamplingParams(max_tokens=12, top_p=0.95, temperature=1.4, seed=5)


@pytest.fixture(scope="module")
def engine(build: Path) -> Iterator[Engine]:
    with Engine.load(build, kv_cache_tokens=2048, threads=1) as engine:
        yield engine


def test_scores_of_a_prompt_are_those_of_transformers(engine: Engine, tokenizer: Tokenizer) -> None:
    llama: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    encoded = tokenizer.encode(PROMPT)
    with torch.no_grad():
        expected = llama(torch.tensor([encoded.ids])).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=4, n=2, prompt_log_probs=True, top_log_probs=3)
    scores = engine.generate(PROMPT, params).prompt_log_probs
    assert [score.token for score in scores] == encoded.ids[1:]
    assert PROMPT.endswith("".join(score.text for score in scores))
    for score, row in zip(scores, expected, strict=False):
        assert score.log_prob == pytest.approx(float(row[score.token]), abs=1e-3)
        assert [top.token for top in score.top] == row.topk(3).indices.tolist()
    pieces = list(engine.stream(PROMPT, params))
    assert [piece.prompt_log_probs for piece in pieces if piece.prompt_log_probs] == [scores]
    assert engine.generate(PROMPT, SamplingParams(max_tokens=4)).prompt_log_probs == ()


def test_a_prompt_of_one_token_has_no_scores(engine: Engine) -> None:
    answer = engine.generate(Tokens([50]), SamplingParams(max_tokens=2, prompt_log_probs=True))
    assert (answer.prompt_log_probs, len(answer.tokens)) == ((), 2)


def test_biases_are_added_to_the_logits_of_their_tokens(engine: Engine) -> None:
    plain = engine.generate(PROMPT, SamplingParams(max_tokens=1, top_log_probs=2))
    (first, second) = plain.log_probs[0].top
    difference = first.log_prob - second.log_prob
    for bias, expected in ((difference + 0.01, second), (difference - 0.01, first)):
        answer = engine.generate(PROMPT, SamplingParams(max_tokens=1, logit_bias={second.token: bias}))
        assert answer.tokens == (expected.token,)
    without = SamplingParams(max_tokens=8, logit_bias={first.token: -math.inf})
    assert first.token not in engine.generate(PROMPT, without).tokens
    assert engine.generate(PROMPT, SamplingParams(max_tokens=3, logit_bias={77: 1000.0})).tokens == (77,) * 3


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({2048: 1.0}, "logit_bias has token 2048"),
        ({-1: 1.0}, "logit_bias has token -1"),
        ({5: math.nan}, "logit_bias is {5: nan}"),
        ({5: math.inf}, "logit_bias is {5: inf}"),
        ({"a": 1.0}, "logit_bias is {'a': 1.0}"),
        ([5], r"logit_bias is \[5\]"),
    ],
)
def test_what_is_no_bias_of_a_token_is_refused(engine: Engine, bias: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(PROMPT, SamplingParams(logit_bias=bias))


def test_top_p_decays_until_its_token_comes(engine: Engine, tokenizer: Tokenizer) -> None:
    """As 1e-6 after the first token, all others are the most likely ones."""
    sampled = engine.generate(PROMPT, SAMPLED).tokens
    decayed = engine.generate(PROMPT, replace(SAMPLED, top_p_decay=1e-6)).tokens
    rest = engine.generate(Tokens([*tokenizer.encode(PROMPT).ids, sampled[0]]), SamplingParams(max_tokens=11)).tokens
    assert decayed == (sampled[0], *rest)
    assert sampled[1] != decayed[1]
    reset = engine.generate(PROMPT, replace(SAMPLED, top_p_decay=1e-6, top_p_reset_id=sampled[0])).tokens
    assert reset[:2] == sampled[:2]
    kept = engine.generate(PROMPT, replace(SAMPLED, top_p_decay=1e-6, top_p_min=0.95)).tokens
    assert kept == sampled
