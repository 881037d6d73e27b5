"""Messages to the engine's thread."""

import os

import pytest

from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.runtime.inbox import Inbox


def test_requests_are_taken_together() -> None:
    inbox, requests = Inbox(), [GenerationRequest(name, (1,), 1) for name in "abc"]
    receivers = [list[Output]() for _ in requests]
    inbox.submit(*((request, receiver.append) for request, receiver in zip(requests, receivers, strict=True)))
    assert inbox.submitted == 3
    taken = inbox.take(wait=True).submitted
    assert [request for request, _ in taken] == requests
    for number, (_, on_output) in enumerate(taken):
        on_output(Output(str(number)))
    assert [receiver[0].request_id for receiver in receivers] == ["0", "1", "2"]


def test_a_forked_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a copy of the engine, but not its thread, and would wait for ever."""
    inbox = Inbox()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    error = inbox.submit((GenerationRequest("a", (1,), 1), lambda output: None))
    inbox.cancel("a", only_waiting=False)
    inbox.close()
    monkeypatch.undo()
    assert isinstance(error, ForgeError)
    assert error.message == "the engine was loaded before this process was forked"
    assert not inbox.closing
    assert inbox.submitted == 0
