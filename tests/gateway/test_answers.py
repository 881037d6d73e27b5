"""The whole gateway over HTTP with a backend without a server; every answer parsed strictly with OpenAI's classes."""

import math
from collections.abc import Iterator

import pytest

from tests.gateway.fake import FakeBackend
from tests.gateway.strict import chat_chunks, chat_of, completion_chunks, completion_of, events, model_of
from tests.gateway.support import Gateway, running
from tests.patience import PATIENCE

USER = {"role": "user", "content": "one two three"}
CHAT, COMPLETIONS = "chat/completions", "completions"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with running([FakeBackend()], served_name="demo") as found:
        yield found


def test_a_chat(gateway: Gateway) -> None:
    answer = chat_of(gateway.post(CHAT, model="demo", messages=[USER], max_tokens=4))
    (choice,) = answer.choices
    assert choice.message.content == "one two threeone"
    assert (choice.finish_reason, choice.index, choice.logprobs, answer.model) == ("length", 0, None, "demo")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.id.startswith("chatcmpl-")


def test_a_streamed_chat(gateway: Gateway) -> None:
    response = gateway.post(CHAT, model="ensemble", messages=[USER], max_tokens=4, stream=True)
    chunks = chat_chunks(response)
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == "one two threeone"
    assert [choice.delta.role for choice in choices] == ["assistant", None, None, None, None]
    assert [choice.finish_reason for choice in choices] == [None] * 4 + ["length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all("usage" not in event for event in events(response))


def test_usage_comes_last_when_asked_for(gateway: Gateway) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2, "model": "demo"}
    for response in (
        gateway.post(CHAT, messages=[USER], **options),
        gateway.post(COMPLETIONS, prompt="one two three", **options),
    ):
        *others, last = events(response)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert all(event["usage"] is None for event in others)


def test_scores_of_a_chat(gateway: Gateway) -> None:
    options = {"model": "demo", "messages": [USER], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    whole = chat_of(gateway.post(CHAT, **options)).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert [(each.token, each.logprob, each.bytes) for each in whole.content] == [
        ("one", -0.5, list(b"one")),
        (" two", -0.5, list(b" two")),
    ]
    assert [(top.token, top.logprob) for top in whole.content[1].top_logprobs] == [(" two", -0.5), ("~0", -1.5)]
    streamed = []
    for chunk in chat_chunks(gateway.post(CHAT, stream=True, **options)):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs is not None else []
    assert [each.model_dump() for each in streamed] == [each.model_dump() for each in whole.content]


def test_several_answers(gateway: Gateway) -> None:
    answer = chat_of(gateway.post(CHAT, model="demo", messages=[USER], max_tokens=2, n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    texts = ["", "", ""]
    for chunk in chat_chunks(gateway.post(CHAT, model="demo", messages=[USER], max_tokens=2, n=3, stream=True)):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["one two"] * 3


def test_usage_tells_what_the_kv_cache_had_of_the_prompt() -> None:
    options = {"model": "demo", "max_tokens": 2}
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    with running([FakeBackend(cached=2)], served_name="demo") as gateway:
        answer = chat_of(gateway.post(CHAT, messages=[USER], n=3, **options))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2, "of the prompt, not of each answer"
        several = gateway.post(COMPLETIONS, prompt=["one two three", "four five six"], **options).json()["usage"]
        assert several["prompt_tokens_details"] == {"cached_tokens": 4}
        echoed = gateway.post(COMPLETIONS, model="demo", prompt="one two three", max_tokens=0, echo=True)
        assert echoed.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3, **details}
        streamed = {**options, "stream": True, "stream_options": {"include_usage": True}}
        for path, prompt in ((CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "one two three"})):
            *_, last = events(gateway.post(path, **prompt, **streamed))
            assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, **details}


def test_nothing_of_a_prompt_in_the_kv_cache_is_said_too() -> None:
    with running([FakeBackend(cached=0)], served_name="demo") as gateway:
        usage = gateway.post(CHAT, model="demo", messages=[USER], max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_stop_words_are_not_returned(gateway: Gateway) -> None:
    for stop in (" three", ["x", "wo three"]):
        answer = chat_of(gateway.post(CHAT, model="demo", messages=[USER], stop=stop, max_tokens=9))
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content in ("one two", "one t")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_completions_of_several_prompts(gateway: Gateway) -> None:
    prompts = ["one two", "three", "four five six"]
    answer = completion_of(gateway.post(COMPLETIONS, model="demo", prompt=prompts, n=2, max_tokens=2))
    assert [choice.text for choice in answer.choices] == ["one two"] * 2 + ["threethree"] * 2 + ["four five"] * 2
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    texts = [""] * 6
    for chunk in completion_chunks(
        gateway.post(COMPLETIONS, model="demo", prompt=prompts, n=2, max_tokens=2, stream=True)
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_token_ids(gateway: Gateway) -> None:
    answer = completion_of(gateway.post(COMPLETIONS, model="demo", prompt=[[5, 6], [7]], max_tokens=2))
    assert [choice.text for choice in answer.choices] == [" 5 6", " 7 7"]


def test_scores_of_a_completion(gateway: Gateway) -> None:
    answer = completion_of(gateway.post(COMPLETIONS, model="demo", prompt="é b", max_tokens=3, logprobs=2))
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert (scores.tokens, scores.token_logprobs, scores.text_offset) == (["é", " b", "é"], [-0.5] * 3, [0, 1, 3])
    assert scores.top_logprobs == [{token: -0.5, "~0": -1.5} for token in ("é", " b", "é")]


@pytest.mark.parametrize(("prompt", "text"), [("one two", "one two"), ([1, 2], " 1 2")])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(gateway: Gateway, prompt: object, text: str, stream: bool) -> None:
    options = {"model": "demo", "prompt": prompt, "max_tokens": 1, "echo": True, "stream": stream}
    first = text.split(" ")[0] or " 1"
    for asked in (options, {**options, "logprobs": 1}):
        response = gateway.post(COMPLETIONS, **asked)
        choices = [event["choices"][0] for event in events(response)] if stream else response.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == text + first
        if "logprobs" in asked:
            scores = choices[0]["logprobs"]
            assert scores["token_logprobs"] == [None, -0.5, -0.5]
            assert "".join(scores["tokens"]) == text + first
            assert scores["top_logprobs"][0] == {}
        else:
            assert all(choice["logprobs"] is None for choice in choices)


def test_a_prompt_is_scored_alone(gateway: Gateway) -> None:
    response = gateway.post(COMPLETIONS, model="demo", prompt="one two", max_tokens=0, echo=True, logprobs=1)
    assert response.status_code == 200
    values = response.json()
    assert values["choices"][0]["text"] == "one two"
    assert values["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert values["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


def test_bytes_of_a_part_of_a_character() -> None:
    from trtforge.gateway.answers import CompletionScores

    halves = [
        {"token": "\ufffd", "bytes": [0xE2, 0x82], "id": 1, "logprob": -1.0, "top_logprobs": []},
        {"token": "\ufffd", "bytes": [0xAC], "id": 2, "logprob": -2.0, "top_logprobs": []},
        {"token": "x", "bytes": [0x78], "id": 3, "logprob": -3.0, "top_logprobs": []},
    ]
    scores = CompletionScores().take(halves, 1)  # type: ignore[arg-type]
    assert scores["tokens"] == ["bytes:\\xe2\\x82", "bytes:\\xac", "x"]
    assert scores["text_offset"] == [0, 0, 1]
    assert scores["top_logprobs"] == [{"bytes:\\xe2\\x82": -1.0}, {"bytes:\\xac": -2.0}, {"x": -3.0}]


def test_a_server_that_does_not_count_gives_no_usage() -> None:
    with running([FakeBackend(old=True)]) as gateway:
        answer = completion_of(gateway.post(COMPLETIONS, model="ensemble", prompt="one two", max_tokens=2))
        assert (answer.usage, answer.choices[0].text, answer.choices[0].finish_reason) == (None, "one two", "stop")


def test_models(gateway: Gateway) -> None:
    import httpx

    values = httpx.get(f"{gateway.url}/models", timeout=PATIENCE).json()
    assert values["object"] == "list"
    assert [model_of(each).id for each in values["data"]] == ["demo"]
    assert model_of(httpx.get(f"{gateway.url}/models/ensemble", timeout=PATIENCE).json()).id == "demo"
    missing = httpx.get(f"{gateway.url}/models/a/b", timeout=PATIENCE)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_health_and_metrics() -> None:
    import httpx

    fake = FakeBackend(is_ready=False)
    with running([fake]) as gateway:
        assert httpx.get(f"{gateway.root}/health", timeout=PATIENCE).status_code == 200
        assert httpx.get(f"{gateway.root}/health/ready", timeout=PATIENCE).status_code == 503
        fake.is_ready = True
        assert httpx.get(f"{gateway.root}/health/ready", timeout=PATIENCE).json() == {"ready": True}
        gateway.post(COMPLETIONS, model="ensemble", prompt="one two", max_tokens=3)
        gateway.post(COMPLETIONS, model="ensemble", prompt="one two", max_tokens=-3)
        gateway.post(COMPLETIONS, model="ensemble", prompt="one two", max_tokens=0, echo=True)
        text = httpx.get(f"{gateway.root}/metrics", timeout=PATIENCE).text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    name = "trtforge_gateway_"
    assert figures[f'{name}requests_total{{endpoint="completions",status="200"}}'] == "2.0"
    assert figures[f'{name}requests_total{{endpoint="completions",status="400"}}'] == "1.0"
    assert (figures[f"{name}prompt_tokens_total"], figures[f"{name}completion_tokens_total"]) == ("4.0", "3.0")
    assert figures[f"{name}requests_running"] == "0.0"
    assert math.isfinite(float(figures[f'{name}request_seconds_sum{{endpoint="completions"}}']))


def test_series_of_all_endpoints_begin_at_0_in_the_format_that_is_asked_for() -> None:
    import httpx

    formats = {
        "*/*": "text/plain; version=0.0.4; charset=utf-8",
        "application/openmetrics-text; version=1.0.0": "application/openmetrics-text; version=1.0.0; charset=utf-8",
    }
    with running([FakeBackend()]) as gateway:
        for accept, content_type in formats.items():
            answer = httpx.get(f"{gateway.root}/metrics", headers={"accept": accept}, timeout=PATIENCE)
            assert answer.headers["content-type"].startswith(content_type)
            for endpoint in ("chat", "completions", "responses"):
                assert f'trtforge_gateway_requests_total{{endpoint="{endpoint}",status="200"}} 0.0' in answer.text
                assert f'trtforge_gateway_request_seconds_count{{endpoint="{endpoint}"}} 0.0' in answer.text
                assert f'trtforge_gateway_first_token_seconds_count{{endpoint="{endpoint}"}} 0.0' in answer.text
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"a", b"\xe2", b"b"], [0, 1, 2]),  # the text is "a\ufffdb"
        ([b"\xe2\x82", b"\xac", b"b"], [0, 0, 1]),
        ([b"\xe2", b"\xe2", b"\x82\xac!"], [0, 1, 1]),
        ([b"\xe2", b"\xff", b"b"], [0, 1, 2]),
    ],
)
def test_offsets_after_bytes_that_become_no_character(pieces: list[bytes], offsets: list[int]) -> None:
    from trtforge.gateway.answers import CompletionScores

    given = [{"token": "", "bytes": list(piece), "id": 1, "logprob": -1.0} for piece in pieces]
    assert CompletionScores().take(given, 0)["text_offset"] == offsets  # type: ignore[arg-type]
