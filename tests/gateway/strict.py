"""OpenAI's own classes, strictly: no unknown field, no missing one, no value of another type."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import httpx
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

AnyModel = TypeVar("AnyModel", bound=BaseModel)
_LISTS = "data: "


def parse(cls: type[AnyModel], values: object) -> AnyModel:
    """An object of one of OpenAI's classes. Raises AssertionError or pydantic's ValidationError."""
    parsed = _adapter(cls).validate_json(json.dumps(values), strict=True)
    _no_extras(parsed)
    return parsed


def chat_of(response: httpx.Response) -> ChatCompletion:
    """A whole answer to a chat."""
    assert response.status_code == 200, response.text
    return parse(ChatCompletion, response.json())


def completion_of(response: httpx.Response) -> Completion:
    """A whole completion."""
    assert response.status_code == 200, response.text
    return parse(Completion, response.json())


def model_of(values: object) -> Model:
    """An entry of /v1/models."""
    return parse(Model, values)


def chat_chunks(response: httpx.Response) -> list[ChatCompletionChunk]:
    """The chunks of a streamed chat."""
    return [parse(ChatCompletionChunk, event) for event in events(response)]


def completion_chunks(response: httpx.Response) -> list[Completion]:
    """The chunks of a streamed completion; the last one may have no finish reason yet."""
    found = []
    for event in events(response):
        for choice in event["choices"]:
            # The class has no null here, though OpenAI's own chunks do.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        found.append(parse(Completion, event))
    return found


def response_of(response: httpx.Response) -> Response:
    """A whole answer of /v1/responses."""
    assert response.status_code == 200, response.text
    return parse(Response, _without_others(response.json()))


def response_events(response: httpx.Response) -> list[ResponseStreamEvent]:
    """The events of a streamed answer of /v1/responses, each named by its type and numbered."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, lines in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = lines.split("\n")
        values = json.loads(data.removeprefix(_LISTS))
        assert (name, number) == (f"event: {values['type']}", values["sequence_number"])
        if "response" in values:
            values["response"] = _without_others(values["response"])
        if "logprobs" in values:
            values["logprobs"] = list(map(_without_bytes, values["logprobs"]))
        event = _adapter(_Event).validate_json(json.dumps({"event": values}), strict=True).event
        assert event.type == values["type"]
        _no_extras(event)
        found.append(event)
    return found


class _Event(BaseModel):
    """One of OpenAI's events."""

    event: ResponseStreamEvent


def _without_others(values: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's answers have more than the class, and the specification Open Responses requires it."""
    assert values.pop("store") is False
    assert {type(values.pop(name)) for name in ("presence_penalty", "frequency_penalty")} == {float}
    assert "completed_at" in values
    return values


def _without_bytes(score: dict[str, Any]) -> dict[str, Any]:
    """Open Responses has the bytes of tokens also in events, the classes only in answers."""
    assert all(isinstance(each, int) for each in score.pop("bytes"))
    score["top_logprobs"] = list(map(_without_bytes, score["top_logprobs"])) if "top_logprobs" in score else None
    return {name: value for name, value in score.items() if value is not None}


def events(response: httpx.Response) -> Sequence[Any]:
    """The JSON of each event of a stream, which ends as OpenAI's do."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done = [line for line in response.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert all(line.startswith(_LISTS) for line in lines)
    return [json.loads(line.removeprefix(_LISTS)) for line in lines]


@cache
def _adapter(cls: type[AnyModel]) -> TypeAdapter[AnyModel]:
    return TypeAdapter(cls)


def _no_extras(value: object) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has no {sorted(value.model_extra)}"
        for name in type(value).model_fields:
            _no_extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _no_extras(item)
