"""Triton's errors as clients get them."""

import json

import pytest

from trtforge.serve.front.answers import as_refusal, stream_error


def refusal(status: int, message: str) -> tuple[int, str, dict[str, str]]:
    told = as_refusal(status, json.dumps({"error": message}).encode(), 1)
    return told.status, told.message, told.headers


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "max_tokens must be at least 1", 400),
        (500, "INVALID_ARGUMENT: top_p is 2", 400),
        (400, "DEADLINE_EXCEEDED: 2 s have passed", 504),
        (500, "NOT_FOUND: no adapter 7", 404),
        (500, "Expected JSON object: attempt to access JSON non-object as object", 400),
        (500, "Failed to process the request(s), message: UNIMPLEMENTED: beams", 501),
        (500, "parameter key 'a' was not found", 400),
        (503, "failed to unload 'x', explicit model load / unload is not allowed if polling is enabled", 400),
        (400, "text says UNAVAILABLE: but not at its start", 400),
    ],
)
def test_the_text_decides_about_the_status(status: int, message: str, expected: int) -> None:
    assert refusal(status, message) == (expected, message, {})


def test_a_refusal_for_load_tells_when_to_retry() -> None:
    assert refusal(400, "UNAVAILABLE: the queue is full; retry in 2.5 s")[::2] == (503, {"retry-after": "3"})
    assert refusal(500, "in ensemble 'ensemble', UNAVAILABLE: stopping")[::2] == (503, {"retry-after": "1"})
    assert refusal(400, "RESOURCE_EXHAUSTED: x")[::2] == (429, {"retry-after": "1"})
    assert refusal(503, "ensemble: Exceeds maximum queue size")[::2] == (503, {"retry-after": "1"})


def test_a_model_that_a_stopping_server_has_unloaded_is_no_mistake_of_the_client() -> None:
    said = "Request for unknown model: 'ensemble' has no available versions"
    assert refusal(400, said) == (503, f"UNAVAILABLE: {said}", {"retry-after": "1"})
    assert refusal(400, "Request for unknown model: 'x' is not found")[0] == 400
    said = "Server is stopping, scheduler for model has stopped accepting new inference requests"
    assert refusal(500, said) == (503, f"UNAVAILABLE: {said}", {"retry-after": "1"})


def test_paths_of_the_server_are_not_told() -> None:
    message = "Failed: /tmp/trtforge-serve-1-x/repository/ensemble/1/model.py(12): and/or /v2/models/x/infer"
    assert refusal(500, message)[1] == "Failed: model.py(12): and/or /v2/models/x/infer"


def test_what_is_no_json_gets_the_name_of_the_status() -> None:
    assert as_refusal(500, b"", 1).message == "Internal Server Error"
    assert as_refusal(404, b"[1]", 1).message == "Not Found"


def test_an_error_in_server_sent_events_is_read() -> None:
    events = b'data: {"error":"UNAVAILABLE: full {x}"}\n\n'
    assert stream_error(events) == b'{"error":"UNAVAILABLE: full {x}"}'
    assert stream_error(b'data: {"text_output":"error"}\n\n') is None
    assert as_refusal(400, events, 1).status == 503
