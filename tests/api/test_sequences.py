"""Several sequences, beams and logits of a prompt by the Python API, compared with `transformers`."""

import asyncio
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.conftest import DEMO_MODEL
from tests.patience import eventually
from trtforge import Answer, Engine, Piece, SamplingParams, Tokens
from trtforge.api.prompts import Prompts
from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import GenerationRequest, OnOutput, Output

PROMPT = "Return the number of items in the list, and a tuple of the first and the last of them"
SAMPLED = SamplingParams(max_tokens=12, n=3, top_p=0.95, temperature=1.4, seed=5)


@pytest.fixture(scope="module")
def engine(beams: Path) -> Iterator[Engine]:
    with Engine.load(beams, kv_cache_tokens=2048, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def llama() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def ended(engine: Engine) -> bool:
    now = engine.statistics()
    return (now.active_requests, now.kv_blocks_used) == (0, 0)


def singly(engine: Engine, params: SamplingParams) -> list[tuple[int, ...]]:
    """The tokens of the sequences, each asked for alone."""
    shared = {"max_tokens": params.max_tokens, "top_p": params.top_p, "temperature": params.temperature}
    seeds = range(params.seed or 0, (params.seed or 0) + params.n)
    return [engine.generate(PROMPT, SamplingParams(**shared, seed=seed)).tokens for seed in seeds]


def of_pieces(pieces: list[Piece], index: int) -> tuple[str, tuple[int, ...]]:
    own = [piece for piece in pieces if piece.index == index]
    return "".join(piece.text for piece in own), tuple(token for piece in own for token in piece.tokens)


def test_sequences_are_those_of_their_seeds(engine: Engine, tokenizer: Tokenizer) -> None:
    answer = engine.generate(PROMPT, SAMPLED)
    assert [each.tokens for each in answer.completions] == singly(engine, SAMPLED)
    assert len({each.tokens for each in answer.completions}) == 3
    assert (answer.text, answer.tokens) == (answer.completions[0].text, answer.completions[0].tokens)
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT).ids)
    assert answer.usage.completion_tokens == sum(len(each.tokens) for each in answer.completions)
    assert eventually(lambda: ended(engine))


def test_sequences_compute_their_prompt_once(engine: Engine) -> None:
    prompt = Tokens(range(100, 180))
    before = engine.statistics().context_tokens
    answer = engine.generate(prompt, SAMPLED)
    assert engine.statistics().context_tokens == before + 80
    assert answer.usage.reused_tokens == 0
    assert engine.generate(prompt, SAMPLED).usage.reused_tokens > 0


def test_streams_of_several_sequences(engine: Engine) -> None:
    answer = engine.generate(PROMPT, SAMPLED)

    async def streamed() -> tuple[list[Piece], Answer]:
        return [piece async for piece in engine.astream(PROMPT, SAMPLED)], await engine.agenerate(PROMPT, SAMPLED)

    pieces, whole = asyncio.run(streamed())
    assert whole.completions == answer.completions
    for made in (pieces, list(engine.stream(PROMPT, SAMPLED))):
        assert [of_pieces(made, index) for index in range(3)] == [
            (each.text, each.tokens) for each in whole.completions
        ]
        assert sorted(piece.index for piece in made if piece.finish_reason) == [0, 1, 2]
        assert [piece.usage is None for piece in made] == [True] * (len(made) - 1) + [False]
        assert made[-1].usage is not None
        assert made[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_a_stop_word_ends_each_sequence_of_its_own(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, n=3, top_p=0.95, temperature=1.4, seed=5)
    free = [each.text for each in engine.generate(PROMPT, params).completions]
    word = free[1][len(free[1]) // 2 :][:3]
    stopped = engine.generate(PROMPT, SamplingParams(**{**vars(params), "stop": [word]})).completions
    assert [each.text for each in stopped] == [text.split(word)[0] for text in free]
    assert stopped[1].finish_reason == "stop"
    assert eventually(lambda: ended(engine))


@pytest.mark.parametrize(("width", "count", "penalty", "early"), [(2, 2, 0.0, True), (4, 3, 1.0, False)])
def test_beams_are_those_of_transformers(
    engine: Engine, llama: Any, tokenizer: Tokenizer, width: int, count: int, penalty: float, early: bool
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    ends = engine._prompts._end_ids
    asked = torch.tensor([ids])
    found = llama.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=12,
        num_beams=width,
        num_return_sequences=count,
        length_penalty=penalty,
        early_stopping=early,
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    params = SamplingParams(
        max_tokens=12, n=count, beam_width=width, length_penalty=penalty, early_stopping=early, log_probs=True
    )
    answer = engine.generate(Tokens(ids), params)
    for row, score, own in zip(
        found.sequences[:, len(ids) :].tolist(), found.sequences_scores.tolist(), answer.completions, strict=True
    ):
        cut = next((place for place, token in enumerate(row) if token in ends), len(row))
        assert own.tokens == tuple(row[:cut])
        length = len(own.tokens) + (own.finish_reason == "stop")
        assert own.cumulative_log_prob / length**penalty == pytest.approx(score, abs=1e-3)
        assert [each.token for each in own.log_probs] == list(own.tokens)
    assert answer.usage.completion_tokens == sum(len(each.tokens) for each in answer.completions)
    assert eventually(lambda: ended(engine))


def test_logits_are_those_of_transformers(engine: Engine, llama: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    params = SamplingParams(**{**vars(SAMPLED), "context_logits": True, "generation_logits": True})
    answer = engine.generate(PROMPT, params)
    assert [each.tokens for each in answer.completions] == singly(engine, SAMPLED)
    assert answer.context_logits is not None
    for each in answer.completions:
        with torch.no_grad():
            expected = llama(torch.tensor([[*ids, *each.tokens]])).logits[0].numpy()
        np.testing.assert_allclose(answer.context_logits, expected[: len(ids)], atol=1e-3, rtol=1e-3)
        assert each.generation_logits is not None
        own = expected[len(ids) - 1 : len(ids) - 1 + len(each.tokens)]
        np.testing.assert_allclose(each.generation_logits, own, atol=1e-3, rtol=1e-3)
    pieces = list(engine.stream(PROMPT, params))
    assert [piece.context_logits is not None for piece in pieces].count(True) == 1
    for index, each in enumerate(answer.completions):
        rows = [piece.generation_logits for piece in pieces if piece.index == index and piece.tokens]
        np.testing.assert_allclose(np.concatenate(rows), each.generation_logits, atol=1e-3, rtol=1e-3)
    assert "logits" not in repr(answer)
    optional = {"context_logits", "prompt_log_probs", "context_phase"}
    assert {"completions", "usage"} | optional == get_type_hints(Answer).keys()
    again = pickle.loads(pickle.dumps(answer))
    assert again == answer
    np.testing.assert_array_equal(again.context_logits, answer.context_logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 129}, "n is 129"),
        ({"n": "a"}, "n is 'a'"),
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 5}, "beam_width is 5, this engine takes at most 4"),
        ({"beam_width": 2, "n": 3}, "n is 3, more than beam_width 2"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty is 11"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty is nan"),
        ({"beam_width": 2, "regex": "a"}, "beam search does not support a guide"),
        ({"beam_width": 2, "generation_logits": True}, "beam search does not return logits"),
        ({"beam_width": 2, "top_log_probs": 2}, "beam search does not return top log probabilities"),
        ({"beam_width": 2, "prompt_log_probs": True}, "beam search does not return top log probabilities"),
    ],
)
def test_what_is_no_search_is_refused_by_its_name(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.generate(PROMPT, SamplingParams(**options))
    assert eventually(lambda: ended(engine))


def test_beams_are_not_streamed(engine: Engine) -> None:
    with pytest.raises(RequestError, match="beam_width is 2, and beam search has no results before"):
        next(engine.stream(PROMPT, SamplingParams(beam_width=2)))


def test_a_stream_of_sequences_that_is_left_ends_them_all(engine: Engine) -> None:
    params = SamplingParams(max_tokens=200, n=3, ignore_end=True)
    for _ in engine.stream(PROMPT, params):
        break

    async def cancelled() -> None:
        task = asyncio.create_task(engine.agenerate(PROMPT, params))
        while not engine.statistics().active_requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert eventually(lambda: ended(engine))
    asyncio.run(cancelled())
    assert eventually(lambda: ended(engine))


class _Held:
    """A runtime whose outputs come when they are told to."""

    def __init__(self) -> None:
        self.submitted: list[tuple[GenerationRequest, OnOutput]] = []
        self.cancelled: list[str] = []

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(tokens_per_block=16)

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> None:
        self.submitted += requests
        for request, on_output in requests:
            on_output(Output(request.request_id, (100,)))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None: ...


def test_what_comes_after_an_event_loop_was_closed_ends_the_request() -> None:
    runtime: Any = _Held()
    loop, stream = asyncio.new_event_loop(), Engine(runtime, Prompts(DEMO_MODEL, 2048)).astream(PROMPT)
    loop.run_until_complete(anext(stream))
    loop.close()
    ((request, on_output),) = runtime.submitted
    assert runtime.cancelled == []
    on_output(Output(request.request_id, (101,)))
    assert runtime.cancelled == [request.request_id]
