"""Steps of a draft engine and an embedded target: what they give together is what the target gives alone."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.package.test_drafted_engine import END, MOST, VOCAB, following
from trtforge.engine_process.messages import Update
from trtforge.engine_process.requests import (
    DraftTokens,
    ErrorCode,
    FinishReason,
    GenerationRequest,
    RequestFailure,
    SamplingParams,
)
from trtforge.runtime.sampler import Sampler
from trtforge.runtime.scheduling.sequence import Sequence

pytestmark = pytest.mark.usefixtures("library")
FAILURE = RequestFailure(ErrorCode.UNAVAILABLE, "the queue is full")


def answer(request: GenerationRequest, next_token: Callable[[list[int]], int]) -> tuple[list[int], FinishReason]:
    """What an engine answers, whose next token is a function of those before; drafts end the request."""
    made: list[int] = []
    drafts = request.drafts.tokens if request.drafts is not None else ()
    while True:
        token = next_token([*request.prompt, *made])
        if token in request.end_ids:
            return made, "end_id"
        made.append(token)
        if any(tuple(made[-len(word) :]) == word for word in request.stop_words):
            return made, "stop_word"
        if len(made) == request.max_tokens:
            return made, "length"
        if request.drafts is not None and (len(made) > len(drafts) or drafts[len(made) - 1] != token):
            assert request.drafts.alone
            return made, "length"


@dataclass
class Client:
    """An engine in the place of its client: it answers at once, in updates of `size` tokens."""

    next_token: Callable[[list[int]], int]
    size: int = 3
    fails: int | None = None
    asked: list[GenerationRequest] = field(default_factory=list)
    cancelled: int = 0
    counted: list[str] = field(default_factory=list)

    def submit(
        self, requests: tuple[GenerationRequest, ...], receiver: Any, timeout: float | None, counted: str
    ) -> object:
        (request,) = requests
        self.counted.append(counted)
        self.asked.append(request)
        if self.fails is not None and len(self.asked) > self.fails:
            receiver.take([(0, Update(finish_reason="error", failure=FAILURE))])
            return object()
        tokens, reason = answer(request, self.next_token)
        logits = np.zeros((len(tokens), VOCAB), np.float32).tobytes() if request.generation_logits else b""
        for first in range(0, len(tokens), self.size):
            receiver.take([(0, Update(tokens[first : first + self.size]))])
        receiver.take([(0, Update(finish_reason=reason, generation_logits=bytearray(logits)))])
        return object()

    def cancel(self, submitted: object) -> None:
        self.cancelled += 1

    def count_answered(self, seconds: float) -> None:
        assert seconds >= 0
        self.counted.append("answered")


@dataclass
class Received:
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    failure: tuple[str, str] | None = None
    ends: int = 0
    pieces: int = 0

    def take(self, pieces: list[Any]) -> None:
        for piece in pieces:
            assert not self.ends
            self.tokens += [token for beam in piece.beams for token in beam]
            self.ends += piece.finished
            self.reason, self.failure = piece.reason, piece.failure
            self.pieces += 1


def run(request: GenerationRequest, draft: Client, target: Client, longest: int = 1000, **more: Any) -> Received:
    from drafted_served import Steps  # type: ignore[import-not-found]

    received = Received()
    Steps(request, received, draft, target, MOST, longest, more.get("with_logits", False)).begin()
    return received


def wrong_at(places: list[bool]) -> Callable[[list[int]], int]:
    return lambda tokens: (following(tokens) + places[len(tokens) % len(places)]) % VOCAB


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=4),
    count=st.integers(1, 30),
    errs=st.lists(st.booleans(), min_size=1, max_size=5),
    size=st.integers(1, 6),
    longest=st.integers(1, 40),
    fails=st.none() | st.integers(0, 4),
    stops=st.booleans(),
)
def test_whatever_the_draft_engine_proposes_the_answer_is_the_targets(
    prompt: list[int], count: int, errs: list[bool], size: int, longest: int, fails: int | None, stops: bool
) -> None:
    request = GenerationRequest("", tuple(prompt), count, end_ids=frozenset({END}))
    free, _ = answer(request, following)
    if stops and len(free) > 3:
        request = GenerationRequest("", tuple(prompt), count, end_ids=frozenset({END}), stop_words=(tuple(free[1:4]),))
    expected, reason = answer(request, following)
    draft, target = Client(wrong_at(errs), size, fails), Client(following, size)
    received = run(request, draft, target, longest)
    assert (received.tokens, received.reason, received.ends) == (expected, reason, 1)
    assert all(len(each.prompt) + len(each.drafts.tokens) < longest for each in target.asked if each.drafts is not None)
    assert all(not each.end_ids and not each.stop_words and each.max_tokens <= MOST for each in draft.asked)


def test_right_drafts_take_a_step_for_five_tokens() -> None:
    request = GenerationRequest("", (5, 3), 20)
    draft, target = Client(following), Client(following)
    received = run(request, draft, target)
    assert len(received.tokens) == 20
    assert [len(each.drafts.tokens) for each in target.asked if each.drafts is not None] == [MOST] * 4
    assert len(target.asked) == 4
    assert (draft.counted, target.counted) == (["nothing"] * 4, [*["failures"] * 4, "answered"])
    assert received.pieces > 4


def test_a_failure_of_the_target_ends_the_request() -> None:
    target = Client(following, fails=1)
    received = run(GenerationRequest("", (5, 3), 20), Client(following), target)
    assert target.counted == ["failures"] * 2
    assert (received.failure, received.ends) == (("the queue is full", "UNAVAILABLE"), 1)
    assert len(received.tokens) == MOST + 1


def test_logits_go_to_the_target_for_sampled_requests_only() -> None:
    for sampling, sends in (
        (SamplingParams(top_k=5), True),
        (SamplingParams(), False),
        (SamplingParams(top_k=5, repetition_penalty=1.2), False),
    ):
        draft, target = Client(following), Client(following)
        run(GenerationRequest("", (5, 3), 9, sampling), draft, target, with_logits=True)
        first = target.asked[0].drafts
        assert isinstance(first, DraftTokens)
        assert len(first.logits) == (4 * MOST * VOCAB if sends else 0)
        assert draft.asked[0].generation_logits == sends


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_k=5, temperature=1.7),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=12, top_p=0.8, temperature=0.6),
        SamplingParams(top_p=1.0),
    ],
)
def test_sent_logits_are_those_that_the_draft_was_drawn_from(sampling: SamplingParams) -> None:
    from drafted_served import _adjusted

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 2
    sent = torch.frombuffer(bytearray(_adjusted(logits.numpy().tobytes(), 3, sampling)), dtype=torch.float32)
    row = Sequence.of(GenerationRequest("", (1,), 9, sampling), 0, 99, lambda output: None)
    sampler = Sampler(50, torch.device("cpu"))
    for found, own in zip(sent.view(3, 50).softmax(1), logits, strict=True):
        torch.testing.assert_close(found, sampler.distribution(row, own.clone()), rtol=1e-4, atol=1e-6)


def test_a_cancelled_request_ends_once_and_begins_no_further_step() -> None:
    from drafted_served import Steps

    received, waits = Received(), threading.Event()
    target = Client(following)

    class Slow(Client):
        def submit(
            self, requests: tuple[GenerationRequest, ...], receiver: Any, timeout: float | None, counted: str
        ) -> object:
            self.waiting = receiver
            waits.set()
            return object()

    draft = Slow(following)
    steps = Steps(GenerationRequest("", (5, 3), 9), received, draft, target, MOST, 100, False)
    steps.begin()
    assert waits.is_set()
    steps.cancel()
    draft.waiting.take([(0, Update([1], finish_reason="cancelled"))])
    assert (received.ends, received.reason, target.asked, draft.cancelled) == (1, "cancelled", [], 2)
    assert not target.counted
