"""/v1/responses over HTTP: every answer and event parsed strictly with OpenAI's classes, and read by its client."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText
from pydantic import BaseModel

from tests.gateway.fake import FakeBackend
from tests.gateway.kserve_server import Servicer, serving
from tests.gateway.strict import response_events, response_of
from tests.gateway.support import Gateway, running
from tests.patience import PATIENCE, eventually
from trtforge.core.api_keys import ApiKeys
from trtforge.core.host_check import HostCheck
from trtforge.gateway.backend import GONE, BackendError
from trtforge.gateway.kserve import KServeBackend

RESPONSES = "responses"
ASKED = {"model": "demo", "input": "one two three", "max_output_tokens": 4}
SCORES = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
KEY = "a-key-of-this-test-0123"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
ARRAY = '[{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "time", "arguments": {}}]'
TAGGED = 'Let me see.\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "name": "weather"}
_IDS = re.compile(r"(resp|msg|fc|call)_[0-9a-f]{48}")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with running([FakeBackend()], served_name="demo") as found:
        yield found


def client(gateway: Gateway, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url, api_key=key, max_retries=0, timeout=PATIENCE)


def words(text: str) -> FakeBackend:
    """A model that answers with this text, a few characters at a time."""
    return FakeBackend(words=tuple(text[start : start + 3] for start in range(0, len(text), 3)))


def without_ids(response: Response) -> Any:
    """A response with what is random and of its time replaced."""
    values = json.loads(_IDS.sub(r"\1", response.model_dump_json()))
    return values | {"created_at": 0, "completed_at": values["completed_at"] and 0}


def test_a_response(gateway: Gateway) -> None:
    answer = response_of(gateway.post(RESPONSES, **ASKED))
    assert answer.output_text == "one two threeone"
    assert (answer.status, answer.model, answer.object, answer.error) == ("incomplete", "demo", "response", None)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.status, message.role) == ("incomplete", "assistant")
    assert answer.usage is not None
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 4, 7)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert (answer.temperature, answer.top_p, answer.tool_choice, answer.tools) == (1.0, 1.0, "auto", [])
    assert (answer.max_output_tokens, answer.truncation, answer.background) == (4, "disabled", False)


def test_an_answer_that_ends_is_complete() -> None:
    with running([words("Hello.")]) as gateway:
        answer = response_of(gateway.post(RESPONSES, model="ensemble", input="Hi"))
    assert (answer.status, answer.incomplete_details, answer.output_text) == ("completed", None, "Hello.")
    assert answer.completed_at is not None
    assert answer.output[0].status == "completed"  # type: ignore[union-attr]


def test_an_answer_repeats_the_request(gateway: Gateway) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "description": None, "strict": True}
    asked = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "tools": [WEATHER],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
        "parallel_tool_calls": False,
        "text": {"format": form},
        "user": "u",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "max_tool_calls": 3,
    }
    answer = response_of(
        gateway.post(RESPONSES, **ASKED, **asked, store=True, service_tier="auto", truncation="disabled")
    )
    found = answer.model_dump(by_alias=True)
    assert {name: found[name] for name in asked if name not in ("tools", "text")} == {
        name: value for name, value in asked.items() if name not in ("tools", "text")
    }
    assert found["text"] == {"format": form, "verbosity": "medium"}
    assert WEATHER.items() <= found["tools"][0].items()


def test_what_was_not_given_has_openais_defaults(gateway: Gateway) -> None:
    asked = {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "presence_penalty": 1}
    values = gateway.post(RESPONSES, **ASKED, **asked).json()
    assert values["text"]["format"]["strict"] is False
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "completed_at")
    assert [values[name] for name in names] == [1.0, 1.0, 1.0, 0.0, 0, None]


def test_the_events_of_a_text_come_in_openais_order(gateway: Gateway) -> None:
    found = response_events(gateway.post(RESPONSES, **ASKED, stream=True))
    assert [event.type for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.delta for event in found if event.type == "response.output_text.delta"] == [
        "one",
        " two",
        " three",
        "one",
    ]
    assert [event.text for event in found if event.type == "response.output_text.done"] == ["one two threeone"]
    begun = [event.response for event in found if event.type in ("response.created", "response.in_progress")]
    assert all((each.status, each.output, each.usage) == ("in_progress", [], None) for each in begun)
    last = found[-1]
    assert last.type == "response.incomplete"
    assert {each.id for each in begun} == {last.response.id}
    assert without_ids(last.response) == without_ids(response_of(gateway.post(RESPONSES, **ASKED)))


def test_scores_are_part_of_the_text_and_of_its_events(gateway: Gateway) -> None:
    whole = response_of(gateway.post(RESPONSES, **ASKED, **SCORES))
    message = whole.output[0]
    assert isinstance(message, ResponseOutputMessage)
    part = message.content[0]
    assert isinstance(part, ResponseOutputText)
    assert part.logprobs is not None
    assert [(each.token, each.logprob, each.bytes) for each in part.logprobs[:2]] == [
        ("one", -0.5, list(b"one")),
        (" two", -0.5, list(b" two")),
    ]
    assert [(top.token, top.logprob) for top in part.logprobs[1].top_logprobs] == [(" two", -0.5), ("~0", -1.5)]
    found = response_events(gateway.post(RESPONSES, **ASKED, **SCORES, stream=True))
    deltas = [each for event in found if event.type == "response.output_text.delta" for each in event.logprobs]
    (done,) = [event.logprobs for event in found if event.type == "response.output_text.done"]
    assert [each.model_dump() for each in deltas] == [each.model_dump() for each in done]
    assert [(each.token, each.logprob) for each in deltas] == [(each.token, each.logprob) for each in part.logprobs]


CALLS = [
    (ARRAY, "required", ["weather", "time"], None),
    ('{"city": "Rome"}', NAMED, ["weather"], None),
    (TAGGED, "auto", ["time"], "Let me see."),
    ("{ but no call", "auto", [], "{ but no call"),
    ("", "auto", [], ""),
]


@pytest.mark.parametrize(("text", "choice", "names", "content"), CALLS)
def test_calls_are_items_whole_and_streamed(text: str, choice: object, names: list[str], content: str | None) -> None:
    asked = {"model": "ensemble", "input": "Hi", "tools": [WEATHER, TIME], "tool_choice": choice}
    with running([words(text) if text else FakeBackend(words=("",))]) as gateway:
        whole = response_of(gateway.post(RESPONSES, **asked))
        found = response_events(gateway.post(RESPONSES, **asked, stream=True))
    last = found[-1]
    assert last.type == "response.completed"
    assert without_ids(last.response) == without_ids(whole)
    items = last.response.output
    calls = [item for item in items if isinstance(item, ResponseFunctionToolCall)]
    assert [call.name for call in calls] == names
    assert [type(item) for item in items] == [
        *([] if content is None else [ResponseOutputMessage]),
        *[ResponseFunctionToolCall] * len(names),
    ]
    assert last.response.output_text == (content or "")
    assert [item.model_dump() for item in items] == [
        event.item.model_dump() for event in found if event.type == "response.output_item.done"
    ]
    assert [event.output_index for event in found if event.type == "response.output_item.added"] == [*range(len(items))]
    for call in calls:
        own = [event for event in found if getattr(event, "item_id", None) == call.id]
        pieces = [event.delta for event in own if event.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == call.arguments
        assert len(pieces) > 1 or call.arguments == "{}"
        done = [event.arguments for event in own if event.type == "response.function_call_arguments.done"]
        assert done == [call.arguments]
    assert len({call.call_id for call in calls} | {call.id for call in calls}) == 2 * len(calls)


def test_a_cut_call_is_incomplete() -> None:
    asked = {"model": "ensemble", "input": "Hi", "tools": [WEATHER], "tool_choice": NAMED, "max_output_tokens": 2}
    with running([words('{"city": "Rome"}')]) as gateway:
        answer = response_of(gateway.post(RESPONSES, **asked))
    (call,) = answer.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.arguments, call.status, answer.status) == ('{"city', "incomplete", "incomplete")


@pytest.mark.parametrize("stream", [True, False])
def test_usage_tells_what_the_kv_cache_had_of_the_input(stream: bool) -> None:
    with running([FakeBackend(cached=2)], served_name="demo") as gateway:
        answer = gateway.post(RESPONSES, **ASKED, stream=stream)
        response = response_events(answer)[-1].response if stream else response_of(answer)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (3, 2)


def test_a_server_that_does_not_count_gives_no_usage() -> None:
    with running([FakeBackend(old=True)]) as gateway:
        answer = response_of(gateway.post(RESPONSES, model="ensemble", input="one two", max_output_tokens=2))
        assert (answer.usage, answer.output_text, answer.status) == (None, "one two", "completed")


class Weather(BaseModel):
    """The weather of a city."""

    city: str


def test_the_openai_client_parses_and_streams() -> None:
    with running([words('{"city": "Rome"}')]) as gateway:
        asked: dict[str, Any] = {"model": "ensemble", "input": "Hi"}
        parsed = client(gateway).responses.parse(**asked, text_format=Weather)
        assert parsed.output_parsed == Weather(city="Rome")
        with client(gateway).responses.stream(**asked, text_format=Weather) as stream:
            snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
            assert stream.get_final_response().output_parsed == Weather(city="Rome")
        assert snapshots[-1] == '{"city": "Rome"}'
        tool = openai.pydantic_function_tool(Weather, name="weather")
        chosen = client(gateway).responses.parse(**asked, tools=[tool], tool_choice=NAMED)
        (call,) = chosen.output
        assert call.type == "function_call"
        assert call.parsed_arguments == Weather(city="Rome")
        with client(gateway).responses.stream(**asked, tools=[tool], tool_choice=NAMED) as stream:
            assert stream.get_final_response().output[0].parsed_arguments == Weather(city="Rome")  # type: ignore[union-attr]


def test_the_asynchronous_client(gateway: Gateway) -> None:
    async def ask() -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0) as asynchronous:
            whole = await asynchronous.responses.create(**ASKED)  # type: ignore[call-overload]
            events = await asynchronous.responses.create(**ASKED, stream=True)  # type: ignore[call-overload]
            text = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
            async with asynchronous.responses.stream(**ASKED) as stream:
                texts = [event.text async for event in stream if event.type == "response.output_text.done"]
            return whole.output_text, text, texts[0]

    assert asyncio.run(ask()) == ("one two threeone",) * 3


def test_what_was_answered_is_sent_back_with_the_results_of_calls() -> None:
    fake = words(TAGGED)
    with running([fake]) as gateway:
        turns: list[Any] = [{"role": "user", "content": "What time is it?"}]
        first = client(gateway).responses.create(model="ensemble", input=turns, tools=[TIME])
        turns += first.output
        call = first.output[-1]
        assert isinstance(call, ResponseFunctionToolCall)
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "noon"})
        client(gateway).responses.create(model="ensemble", input=turns, tools=[TIME])
    assert json.loads(fake.requests[-1].messages or "") == {
        "messages": [
            {"role": "user", "content": "What time is it?"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [
                    {"id": call.call_id, "type": "function", "function": {"name": "time", "arguments": {}}},
                ],
            },
            {"role": "tool", "content": "noon", "tool_call_id": call.call_id},
        ],
        "tools": [{"type": "function", "function": {"name": "time"}}],
    }


def test_over_a_server_of_kserve() -> None:
    servicer = Servicer(FakeBackend())
    with serving(servicer) as address, running([KServeBackend(address)]) as gateway:
        found = response_events(gateway.post(RESPONSES, **{**ASKED, "model": "ensemble"}, stream=True, top_k=5))
    last = found[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == "one two threeone"
    ((model, values),) = servicer.asked
    assert (model, values["max_tokens"], values["top_k"]) == ("ensemble", 4, 5)
    assert json.loads(values["messages"]) == [{"role": "user", "content": "one two three"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (BackendError("INVALID_ARGUMENT: no", "INVALID_ARGUMENT"), openai.BadRequestError, None),
        (BackendError("UNAVAILABLE: the queue is full", "UNAVAILABLE"), openai.RateLimitError, "rate_limit_exceeded"),
        (BackendError("the model server cannot be reached", GONE), openai.InternalServerError, "server_unavailable"),
    ],
)
def test_errors_before_the_first_token_have_their_status(
    error: BackendError, expected: type[openai.APIStatusError], code: str | None, stream: bool
) -> None:
    with running([FakeBackend(error=error)]) as gateway, pytest.raises(expected) as caught:
        client(gateway).responses.create(model="ensemble", input="one", stream=stream)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BackendError("UNAVAILABLE: the server is ending", "UNAVAILABLE"), "server_error", "the server is ending"),
        (BackendError("INVALID_ARGUMENT: no", "INVALID_ARGUMENT"), "invalid_prompt", "no"),
        (BackendError("UNAVAILABLE: too many x", "UNAVAILABLE"), "rate_limit_exceeded", "too many x"),
        (KeyError("a secret"), "server_error", "the gateway failed"),
    ],
)
def test_an_error_after_the_first_token_is_a_failed_response(error: Any, code: str, said: str) -> None:
    with running([FakeBackend(error=error, error_at=2)]) as gateway:
        found = response_events(gateway.post(RESPONSES, model="ensemble", input="one two three", stream=True))
        counted = httpx.get(f"{gateway.root}/metrics", timeout=PATIENCE).text
    assert "trtforge_gateway_prompt_tokens_total 3.0" in counted.splitlines()
    assert "trtforge_gateway_completion_tokens_total 2.0" in counted.splitlines()
    failed = found[-1]
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert (failed.response.status, failed.response.error.code, failed.response.error.message) == ("failed", code, said)
    assert (failed.response.output_text, failed.response.output[0].status) == ("one two", "incomplete")  # type: ignore[union-attr]
    assert 'trtforge_gateway_requests_total{endpoint="responses",status="200"} 0.0' in counted


def test_refusals_are_of_the_clients_classes(gateway: Gateway) -> None:
    asked = client(gateway).responses
    with pytest.raises(openai.NotFoundError) as missing:
        asked.create(model="gpt-6", input="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="answers are not stored by this server") as caught:
        asked.create(model="demo", input="Hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        asked.retrieve("resp_1")


def test_a_model_without_guided_decoding_refuses_what_needs_it() -> None:
    with running([FakeBackend(old=True)]) as gateway:
        for given, param in (
            ({"text": {"format": {"type": "json_object"}}}, "text.format"),
            ({"tools": [TIME], "tool_choice": "required"}, "tool_choice"),
        ):
            answer = gateway.post(RESPONSES, model="ensemble", input="Hi", **given)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert f"so {param} can only be" in answer.json()["error"]["message"]


def test_keys_and_hosts_are_those_of_the_other_endpoints() -> None:
    with running([FakeBackend()], keys=ApiKeys((KEY,))) as gateway:
        with pytest.raises(openai.AuthenticationError):
            client(gateway).responses.create(model="ensemble", input="Hi")
        assert client(gateway, KEY).responses.create(model="ensemble", input="Hi", max_output_tokens=1).output_text
    fake = FakeBackend()
    with running([fake], hosts=HostCheck.of("127.0.0.1", (), with_keys=False)) as gateway:
        headers = {"origin": "http://evil.example"}
        body = '{"model":"ensemble","input":"Hi"}'
        answer = httpx.post(f"{gateway.url}/{RESPONSES}", content=body, headers=headers, timeout=PATIENCE)
    assert (answer.status_code, fake.requests) == (403, [])


def test_a_client_that_leaves_cancels_its_request_and_is_counted() -> None:
    fake = FakeBackend(delay=0.02)
    with running([fake]) as gateway:
        stream = client(gateway).responses.create(model="ensemble", input="a b", stream=True)
        types: Sequence[str] = [next(stream).type for _ in range(5)]
        assert types[-1] == "response.output_text.delta"
        stream.close()
        assert eventually(lambda: fake.running == 0)
        assert fake.cancelled == 1
        counted = f"{gateway.root}/metrics"
        left = 'trtforge_gateway_requests_total{endpoint="responses",status="499"} 1.0'
        assert eventually(lambda: left in httpx.get(counted, timeout=PATIENCE).text)
