"""Requests with the same beginning go to the same server, as long as it has not too many more than the others."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.fake import FakeBackend
from tests.gateway.test_router import run
from trtforge.gateway.backend import GONE, BackendError
from trtforge.gateway.prefixes import Prefixes, parts_of
from trtforge.gateway.request import Sampling, TextRequest
from trtforge.gateway.router import Router

REQUEST = TextRequest("ensemble", 3, stream=True)


def asked(text: str) -> TextRequest:
    return replace(REQUEST, prompt=text)


def chat(*contents: str) -> TextRequest:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return replace(REQUEST, messages=json.dumps(messages))


def servers_of(router: Router, fakes: list[FakeBackend], requests: list[TextRequest], *, together: bool) -> list[int]:
    """The server that each request goes to, while those before are unfinished or after they were answered."""

    async def opened() -> list[int]:
        found, streams = [], []
        for request in requests:
            before = [len(fake.requests) for fake in fakes]
            streams.append(router.generate(request))
            await anext(streams[-1])
            if not together:
                await streams[-1].aclose()
            found.append(next(index for index, fake in enumerate(fakes) if len(fake.requests) > before[index]))
        await asyncio.gather(*(stream.aclose() for stream in streams))
        return found

    return run(opened())


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (asked("a" * 600), asked("a" * 512 + "b" * 500), 2),
        (asked("a" * 255), asked("a" * 255), 0),
        (asked("a" * 256), asked("a" * 256), 1),
        (asked("é" * 300), asked("e" * 300), 0),
        (replace(REQUEST, prompt=tuple(range(200))), replace(REQUEST, prompt=tuple(range(130))), 2),
        (replace(REQUEST, prompt=(1, 23) * 40), replace(REQUEST, prompt=(12, 3) * 40), 0),
        (chat("s" * 300, "hello"), chat("s" * 300, "hello", "yes?", "more"), 1),
        (replace(asked("a" * 300), adapter=1), asked("a" * 300), 0),
        (replace(asked("a" * 300), sampling=Sampling(cache_salt="x")), asked("a" * 300), 0),
        (replace(asked("a" * 300), sampling=Sampling(temperature=0.5)), asked("a" * 300), 1),
        (asked("a" * 200_000), asked("a" * 200_000), 512),
        (REQUEST, REQUEST, 0),
    ],
)
def test_parts_are_equal_as_far_as_the_beginnings_are(first: TextRequest, second: TextRequest, equal: int) -> None:
    found = [one == other for one, other in zip(parts_of(first), parts_of(second), strict=False)]
    assert (sum(found), found) == (equal, sorted(found, reverse=True))


def test_a_conversation_stays_where_it_is() -> None:
    fakes = [FakeBackend() for _ in range(3)]
    router = Router(fakes)
    system = "You are a helpful assistant. " * 20
    begun = [chat(f"{name}: {system}", "Hello") for name in "ABC"]
    assert servers_of(router, fakes, begun, together=True) == [0, 1, 2]
    later = [chat(f"{name}: {system}", "Hello", "Hi", "How are you?") for name in "CAB"]
    assert servers_of(router, fakes, later, together=False) == [2, 0, 1]
    assert servers_of(router, fakes, [chat("B: " + system, "Bye"), asked("new" * 400)], together=True) == [1, 0]


@pytest.mark.parametrize(("parts", "more"), [(0, 1), (1, 1), (3, 3), (40, 8)])
def test_a_known_beginning_is_worth_a_request_for_each_part_of_it(parts: int, more: int) -> None:
    """After so many more than elsewhere the next one goes to the other server, which then knows it too."""
    fakes = [FakeBackend(), FakeBackend()]
    router = Router(fakes)
    prompt = asked("a" * (256 * parts + 10))
    assert servers_of(router, fakes, [prompt], together=False) == [0]
    assert servers_of(router, fakes, [prompt] * (more + 4), together=True)[: more + 1] == [*[0] * more, 1]


def test_a_server_that_was_gone_knows_nothing() -> None:
    prompt = asked("a" * 600)
    fakes = [FakeBackend(), FakeBackend()]
    router = Router(fakes)

    async def ask() -> None:
        async with aclosing(router.generate(prompt)) as pieces:
            assert [piece.text async for piece in pieces]

    run(ask())
    fakes[0].error = BackendError("gone", GONE)
    run(ask())
    fakes[0].error = None
    run(ask())
    assert [len(fake.requests) for fake in fakes] == [2, 2]


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=6)), max_size=40), st.integers(1, 12))
def test_what_is_known_is_what_was_noted_last(noted: list[tuple[int, list[int]]], most: int) -> None:
    """As far as it is kept: never a part without those before it, and the last prompt as a whole."""
    prefixes = Prefixes(3, most)

    for server, prompt in noted:
        own = parts_of(of_parts(prompt))
        prefixes.note(server, own)
        assert prefixes.known(server, own) == min(len(own), most)
        assert all(len(each) <= most for each in prefixes._parts)
    for server in range(3):
        for _, prompt in noted:
            own = parts_of(of_parts(prompt))
            of_server = [other for place, other in noted if place == server]
            longest = max((common(prompt, other) for other in of_server), default=0)
            assert prefixes.known(server, own) <= longest
            if most == 12 and sum(map(len, of_server)) <= most:
                assert prefixes.known(server, own) == longest


def of_parts(numbers: list[int]) -> TextRequest:
    """A prompt with so many parts; equal numbers are equal parts."""
    return replace(REQUEST, prompt=tuple(token for each in numbers for token in [each] * 64))


def common(one: list[int], other: list[int]) -> int:
    """The length of the longest common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
