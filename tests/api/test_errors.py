"""Errors and representations of the Python API: readable, and no reference to what they came from."""

import pydoc
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge import Engine, SamplingParams
from trtforge.api.prompts import Prompts
from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import Output


class _Failed:
    """A runtime that failed: it refuses all requests with one error."""

    error = ForgeError("the engine failed", hint="Load it again.")

    def submit(self, *requests: Any) -> None:
        for request, on_output in requests:
            on_output(Output(request.request_id, finish_reason="error", error=self.error))

    def cancel(self, request_id: str) -> None: ...

    def close(self) -> None: ...


def test_the_error_of_a_failed_engine_keeps_no_traceback() -> None:
    """Python appends to the traceback of an exception that is raised again; its frames keep their variables."""
    runtime: Any = _Failed()
    engine = Engine(runtime, Prompts(DEMO_MODEL, 2048))
    for answer in (engine.generate, lambda prompt: list(engine.stream(prompt))):
        with pytest.raises(ForgeError, match="the engine failed") as raised:
            answer("A list is")
        assert raised.value.hint == "Load it again."
    assert _Failed.error.__traceback__ is None


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        (SamplingParams(), "SamplingParams()"),
        (SamplingParams(4, top_p=0.9, stop=["a"]), "SamplingParams(max_tokens=4, top_p=0.9, stop=['a'])"),
        (SamplingParams(min_tokens=False, adapter="sql"), "SamplingParams(min_tokens=False, adapter='sql')"),
    ],
)
def test_options_are_shown_where_they_differ_from_the_defaults(params: SamplingParams, shown: str) -> None:
    assert repr(params) == shown


def test_help_shows_short_signatures() -> None:
    shown = pydoc.plain(pydoc.render_doc(Engine.stream))
    assert "trtforge.api.sampling_params.SamplingParams = SamplingParams())" in shown
