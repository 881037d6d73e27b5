"""Several servers as one: least work, failover, names of models."""

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from typing import TypeVar

import pytest

from tests.gateway.fake import FakeBackend
from tests.patience import PATIENCE
from trtforge.gateway.backend import GONE, BackendError
from trtforge.gateway.request import Piece, TextRequest
from trtforge.gateway.router import Router

Result = TypeVar("Result")
REQUEST = TextRequest("ensemble", 3, prompt="a", stream=True)
LOST = BackendError("the model server cannot be reached", GONE)


def run(work: Awaitable[Result]) -> Result:
    async def bounded() -> Result:
        return await asyncio.wait_for(work, PATIENCE)

    return asyncio.run(bounded())


async def pieces(router: Router, request: TextRequest = REQUEST) -> list[Piece]:
    async with aclosing(router.generate(request)) as found:
        return [piece async for piece in found]


def test_requests_go_where_the_fewest_are_unfinished() -> None:
    fakes = [FakeBackend(delay=0.01) for _ in range(3)]
    router = Router(fakes)

    async def six() -> None:
        await asyncio.gather(*(pieces(router) for _ in range(6)))
        assert set(router._outstanding.values()) == {0}

    run(six())
    assert [len(fake.requests) for fake in fakes] == [2, 2, 2]


def test_a_server_that_is_gone_is_left_out() -> None:
    gone, here = FakeBackend(error=LOST), FakeBackend()
    assert [piece.text for piece in run(pieces(Router([gone, here])))] == ["a", "a", "a"]
    assert (len(gone.requests), len(here.requests)) == (1, 1)


def test_an_answer_that_broke_off_is_not_started_again() -> None:
    breaks, here = FakeBackend(error=LOST, error_at=1), FakeBackend()
    with pytest.raises(BackendError, match="cannot be reached"):
        run(pieces(Router([breaks, here])))
    assert here.requests == []


def test_other_errors_are_not_tried_elsewhere() -> None:
    refuses, here = FakeBackend(error=BackendError("no", "INVALID_ARGUMENT")), FakeBackend()
    with pytest.raises(BackendError, match="no"):
        run(pieces(Router([refuses, here])))
    assert here.requests == []


def test_models_of_all_servers_are_known_by_both_names() -> None:
    first, second = FakeBackend(name="a_ensemble"), FakeBackend(name="b_ensemble")
    router = Router([first, second], "llama")

    async def names() -> list[str]:
        chosen = [await router.named(name) for name in ("llama", "a_ensemble", "b_ensemble")]
        return [f"{each.model.name}={each.name}" for each in chosen]

    assert run(names()) == ["a_ensemble=llama", "a_ensemble=llama", "b_ensemble=b_ensemble"]
    run(pieces(router, TextRequest("b_ensemble", 1, prompt="a")))
    assert (len(first.requests), len(second.requests)) == (0, 1)


def test_an_unknown_model_is_asked_for_again_at_most_once_a_second() -> None:
    router = Router([FakeBackend()])

    async def ask() -> None:
        for _ in range(3):
            with pytest.raises(BackendError, match="'other' does not exist"):
                await router.named("other")

    run(ask())


def test_one_server_of_two_is_enough() -> None:
    gone, here = FakeBackend(is_ready=False), FakeBackend()

    async def both() -> tuple[bool, int]:
        router = Router([gone, here])
        return await router.ready(), len(await router.models())

    assert run(both()) == (True, 1)


def test_without_any_server_the_reason_is_told() -> None:
    router = Router([FakeBackend(is_ready=False)])
    assert not run(router.ready())
    with pytest.raises(BackendError, match="cannot be reached"):
        run(Router([FakeBackend(is_ready=False)]).models())
