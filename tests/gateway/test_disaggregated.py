"""Servers that compute prompts before others that generate: what each is asked, and what clients get."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.gateway.fake import FakeBackend
from tests.gateway.test_router import LOST, REQUEST, pieces, run
from trtforge.gateway.backend import BackendError
from trtforge.gateway.disaggregated import Disaggregated
from trtforge.gateway.request import TextRequest

PHASE = b"handed on"


def types(backend: FakeBackend) -> list[tuple[str, bytes, bool]]:
    return [(request.request_type, request.context_phase, request.stream) for request in backend.requests]


def test_a_context_is_computed_first_and_handed_on() -> None:
    context, generation = FakeBackend(phase=PHASE, cached=7), FakeBackend(cached=90)
    found = run(pieces(Disaggregated([generation], [context])))
    assert [piece.text for piece in found] == ["a", "a", "a"]
    assert types(context) == [("context_only", b"", False)]
    assert types(generation) == [("generation_only", PHASE, True)]
    assert [piece.cached_tokens for piece in found] == [7, 7, 7]  # the rest came from the other server, not from before


def test_answers_that_end_with_their_first_token_tell_what_was_cached_too() -> None:
    """The server that generates does not look: its engine never runs them."""
    context, generation = FakeBackend(phase=PHASE, cached=7), FakeBackend()
    found = run(pieces(Disaggregated([generation], [context]), replace(REQUEST, max_tokens=1)))
    assert [piece.cached_tokens for piece in found] == [7]


@pytest.mark.parametrize("changes", [{"sequences": 2}, {"prompt_logprobs": True}])
def test_what_cannot_be_split_goes_to_a_server_that_generates(changes: dict[str, int]) -> None:
    context, generation = FakeBackend(phase=PHASE), FakeBackend(cached=3)
    request = replace(REQUEST, **changes)  # type: ignore[arg-type]
    found = run(pieces(Disaggregated([generation], [context]), request))
    assert (context.requests, generation.requests) == ([], [request])
    assert found[0].cached_tokens == 3


def test_without_a_server_for_contexts_the_others_do_it_all() -> None:
    gone, generation = FakeBackend(error=LOST), FakeBackend()
    assert len(run(pieces(Disaggregated([generation], [gone, gone])))) == 3
    assert len(gone.requests) == 2
    assert types(generation) == [("context_and_generation", b"", True)]


@pytest.mark.parametrize(
    ("context", "said"),
    [
        (FakeBackend(error=BackendError("the queue is full", "UNAVAILABLE")), "the queue is full"),
        (FakeBackend(reason="cancelled"), "the server cancelled the request"),
        (FakeBackend(), "the server for contexts returned no context_phase_params"),
    ],
)
def test_an_error_of_the_context_is_the_requests(context: FakeBackend, said: str) -> None:
    generation = FakeBackend()
    with pytest.raises(BackendError, match=said):
        run(pieces(Disaggregated([generation], [context])))
    assert generation.requests == []


def test_contexts_with_the_same_beginning_go_to_the_same_server() -> None:
    contexts = [FakeBackend(phase=PHASE) for _ in range(3)]
    request = TextRequest("ensemble", 2, prompt="word " * 1000, stream=True)
    router = Disaggregated([FakeBackend()], contexts)

    async def one_after_the_other() -> None:
        for _ in range(4):
            await pieces(router, request)

    run(one_after_the_other())
    assert sorted(len(context.requests) for context in contexts) == [0, 0, 4]


def test_a_client_that_leaves_ends_the_context_too() -> None:
    context, generation = FakeBackend(phase=PHASE, held=True), FakeBackend()

    async def left() -> None:
        task = asyncio.ensure_future(pieces(Disaggregated([generation], [context])))
        while not context.running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(left())
    assert (context.running, context.cancelled, generation.requests) == (0, 1, [])


def test_closing_closes_both_kinds() -> None:
    context, generation = FakeBackend(), FakeBackend()

    async def close() -> None:
        router = Disaggregated([generation], [context])
        async with aclosing(router.generate(REQUEST)):
            pass
        await router.close()

    run(close())
    assert (context.closed, generation.closed) == (True, True)
