"""Messages to the engine's thread."""

import os

import pytest

from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.inbox import Inbox


def test_a_forked_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a copy of the engine, but not its thread, and would wait for ever."""
    inbox = Inbox()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    error = inbox.submit(GenerationRequest("a", (1,), 1), lambda output: None)
    inbox.cancel("a", only_waiting=False)
    inbox.close()
    monkeypatch.undo()
    assert isinstance(error, ForgeError)
    assert error.message == "the engine was loaded by another process, which this one was forked from"
    assert not inbox.closing
    assert inbox.submitted == 0
