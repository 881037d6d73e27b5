"""Priorities of requests: the engine answers higher ones first, with the same tokens."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.runtime.test_engine import Tokens, requests_for
from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate


def test_waiting_requests_are_answered_in_order_of_their_priority(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    priorities = (0.25, 0.5, 1.0, 0.5)
    requests = [replace(each, priority=own) for each, own in zip(requests_for(prompts[:4]), priorities, strict=True)]
    ended: list[str] = []
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    done = threading.Event()

    def receive(output: Output) -> None:
        tokens[output.request_id] += output.tokens
        if output.finish_reason is not None:
            ended.append(output.request_id)
            if len(ended) == len(requests):
                done.set()

    with Engine.load(engine_directory, EngineOptions(max_batch_size=1)) as engine:
        engine.submit(*((request, receive) for request in requests))
        assert done.wait(PATIENCE)
    assert ended == [requests[number].request_id for number in (2, 1, 3, 0)]
    assert [tokens[each.request_id] for each in requests] == [list(each) for each in expected[:4]]


@pytest.mark.parametrize("priority", [-0.1, 1.1, float("nan")])
def test_a_priority_outside_of_its_range_is_refused(engine_directory: Path, priority: float) -> None:
    (made,) = generate(engine_directory, [GenerationRequest("a", (1,), 1, priority=priority)])
    assert isinstance(made.error, RequestError)
    assert made.error.message == f"priority is {priority:g}"
    assert made.error.hint == "It must be between 0 and 1."
