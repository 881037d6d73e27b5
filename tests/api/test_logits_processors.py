"""Logits processors and time limits by the Python API."""

import asyncio
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trtforge import Engine, Piece, SamplingParams
from trtforge.core.errors import RequestError

PROMPT = "Return the number of items in the list"


@pytest.fixture(scope="module")
def engine(build: Path) -> Iterator[Engine]:
    with Engine.load(build, kv_cache_tokens=2048, threads=1) as engine:
        yield engine


class Allow:
    """The example of TensorRT-LLM (examples/llm-api/llm_logits_processor.py), in its own terms: only one token."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        mask = torch.full_like(logits, fill_value=float("-inf"), device="cpu")
        mask[:, :, self.allowed] = 0
        stream: Any = None if stream_ptr is None else torch.cuda.ExternalStream(stream_ptr)
        with torch.cuda.stream(stream):
            mask = mask.to(logits.device, non_blocking=True)
            logits += mask


def test_a_processor_of_the_llm_api_runs_unchanged(engine: Engine) -> None:
    assert engine.generate(PROMPT, SamplingParams(max_tokens=4, logits_processor=Allow(77))).tokens == (77,) * 4
    several = SamplingParams(max_tokens=4, n=2, top_p=1.0, logits_processor=[Allow(78)])
    assert [each.tokens for each in engine.generate(PROMPT, several).completions] == [(78,) * 4] * 2


def test_pieces_of_a_stream_are_processed(engine: Engine) -> None:
    async def streamed() -> list[Piece]:
        params = SamplingParams(max_tokens=3, logits_processor=(Allow(79),))
        return [piece async for piece in engine.astream(PROMPT, params)]

    assert [token for piece in asyncio.run(streamed()) for token in piece.tokens] == [79] * 3


def test_an_exception_is_the_cause_of_the_error(engine: Engine) -> None:
    def processor(*_: object) -> None:
        raise KeyError("no such state")

    with pytest.raises(RequestError, match="the logits processor failed: KeyError: 'no such state'") as raised:
        engine.generate(PROMPT, SamplingParams(max_tokens=3, logits_processor=processor))
    assert isinstance(raised.value.__cause__, KeyError)
    assert 'raise KeyError("no such state")' in "".join(traceback.format_exception(raised.value))
    assert engine.generate(PROMPT, SamplingParams(max_tokens=3)).usage.completion_tokens == 3


@pytest.mark.parametrize("given", ["text", 3, [3], {"a": 1}, [Allow(3), None]])
def test_what_cannot_be_called_is_refused(engine: Engine, given: Any) -> None:
    with pytest.raises(RequestError, match="logits_processor is "):
        engine.generate(PROMPT, SamplingParams(max_tokens=3, logits_processor=given))


def test_a_request_has_a_time_limit(engine: Engine) -> None:
    answer = engine.generate(PROMPT, SamplingParams(max_tokens=400, ignore_end=True, allotted_time_ms=1))
    whole = engine.generate(PROMPT, SamplingParams(max_tokens=400, ignore_end=True))
    assert answer.finish_reason == "timed_out"
    assert answer.tokens == whole.tokens[: len(answer.tokens)] != whole.tokens
    assert answer.usage.completion_tokens == len(answer.tokens)
    in_time = SamplingParams(max_tokens=4, ignore_end=True, allotted_time_ms=10**9)
    assert engine.generate(PROMPT, in_time).finish_reason == "length"


@pytest.mark.parametrize("limit", [0, -1, 1.5, "soon"])
def test_a_limit_is_a_positive_number(engine: Engine, limit: Any) -> None:
    with pytest.raises(RequestError, match="allotted_time_ms is "):
        engine.generate(PROMPT, SamplingParams(allotted_time_ms=limit))
