"""OpenAI's API over the real Triton server with the demo engine: answers and counts are the engine's own."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import (
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolParam,
)
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from tests.assault.repositories import build
from tests.assault.server import Server, serving
from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE, eventually
from tests.serve.openai_mix import answered, cases, chat_prompt, text_of
from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with

AT_ONCE = 32
END_IDS = frozenset((1, 3))  # of the demo model's generation_config.json
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a list?"},
]


@dataclass(frozen=True)
class Served:
    """A server and its repository."""

    server: Server
    url: str
    repository: Path

    @property
    def engine(self) -> Path:
        """Its engine."""
        return self.repository / "tensorrt_llm" / "1" / "engine"

    def client(self) -> OpenAI:
        """OpenAI's own client."""
        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = build("demo-fp32", tmp_path_factory.mktemp("openai"))
    with serving(repository) as server:
        assert eventually(lambda: len(server.output) > 1)
        ready, line = server.output[:2]
        assert ready == f"ready http={server.http} grpc={server.grpc} metrics=127.0.0.1:{server.ports['metrics']}"
        assert line.startswith("openai=http://127.0.0.1:")
        yield Served(server, line.removeprefix("openai="), repository)


WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
        },
    },
}
TIME: ChatCompletionToolParam = {"type": "function", "function": {"name": "time"}}


class Listing(BaseModel):
    """What an answer is asked to be."""

    kind: Literal["list", "tuple"]
    items: Annotated[list[Annotated[int, Field(ge=0, le=99)]], Field(max_length=3)]


def test_the_openai_client_gets_answers_of_its_schema(served: Served) -> None:
    client = served.client()
    for temperature in (0.0, 1.0):
        parsed = client.chat.completions.parse(
            model="ensemble", messages=MESSAGES, response_format=Listing, temperature=temperature, seed=3
        )
        choice = parsed.choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Listing)
    with client.chat.completions.stream(model="ensemble", messages=MESSAGES, response_format=Listing) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Listing)
    with pytest.raises(openai.BadRequestError, match=r"the guide of type json_schema is refused: #: Unsupported type"):
        client.chat.completions.create(
            model="ensemble",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nope"}}},
        )


def test_the_openai_client_gets_calls_of_its_tools(served: Served) -> None:
    client = served.client()
    tools = [WEATHER, TIME]
    required = client.chat.completions.create(
        model="ensemble", messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=5
    )
    (call,) = required.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("weather", "time")
    assert required.choices[0].finish_reason == "tool_calls"
    choice: ChatCompletionNamedToolChoiceParam = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(model="ensemble", messages=MESSAGES, tools=tools, tool_choice=choice) as stream:
        (named,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert named.function.name == "weather"
    jsonschema.validate(json.loads(named.function.arguments), WEATHER["function"]["parameters"])
    turns: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        {
            "role": "assistant",
            "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "time", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]
    free = client.chat.completions.create(model="ensemble", messages=turns, tools=tools, max_tokens=8)
    assert free.choices[0].message.content


def test_the_openai_client_has_responses(served: Served) -> None:
    client = served.client()
    chat = client.chat.completions.create(model="ensemble", messages=MESSAGES, max_tokens=12, temperature=0)
    asked: dict[str, Any] = {"model": "ensemble", "instructions": "Be brief.", "input": "What is a list?"}
    answer = client.responses.create(**asked, max_output_tokens=12, temperature=0)
    assert answer.output_text == chat.choices[0].message.content != ""
    assert chat.usage is not None
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens == len(chat_prompt(MESSAGES))
    with client.responses.stream(**asked, text_format=Listing, temperature=1, extra_body={"seed": 3}) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Listing)
    assert isinstance(client.responses.parse(**asked, text_format=Listing).output_parsed, Listing)


def test_the_openai_client_has_responses_that_call_functions(served: Served) -> None:
    function = WEATHER["function"]
    tool: Any = {"type": "function", "name": "weather", "parameters": function["parameters"], "strict": True}
    asked: dict[str, Any] = {"model": "ensemble", "tools": [tool], "parallel_tool_calls": False}
    turns: list[Any] = [{"role": "user", "content": "How is Rome?"}]
    for choice in ("required", {"type": "function", "name": "weather"}):
        with served.client().responses.stream(**asked, input=turns, tool_choice=choice) as stream:
            (call,) = stream.get_final_response().output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), function["parameters"])
        turns += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert served.client().responses.create(**asked, input=turns, max_output_tokens=8).output_text


def test_200_mixed_requests_at_once_equal_the_engine(served: Served, tokenizer: Tokenizer) -> None:
    mixed = cases(tokenizer)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda case: answered(served.url, case), mixed))
    with Engine.load(served.engine) as engine:
        asked = [GenerationRequest("", case.prompt, case.max_tokens, end_ids=END_IDS) for case in mixed]
        answers = generate_with(engine, asked)
    reasons = {"end_id": "stop", "length": "length"}
    expected = [
        (
            text_of(tokenizer, case.prompt, answer),
            reasons[answer.finish_reason],
            len(case.prompt),
            len(answer.tokens),
        )
        for case, answer in zip(mixed, answers, strict=True)
    ]
    assert found == expected


def test_the_synchronous_client(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["ensemble"]
    assert client.models.retrieve("ensemble").object == "model"
    chat = client.chat.completions.create(model="ensemble", messages=MESSAGES, max_tokens=12, temperature=0)
    chunks = list(
        client.chat.completions.create(model="ensemble", messages=MESSAGES, max_tokens=12, temperature=0, stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == chat.choices[0].finish_reason
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(chat_prompt(MESSAGES))


def test_the_asynchronous_client(served: Served) -> None:
    async def ask() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            options = {"model": "ensemble", "prompt": "Return the number of", "max_tokens": 12, "temperature": 0}
            whole = await client.completions.create(**options)  # type: ignore[call-overload]
            stream = await client.completions.create(**options, stream=True)  # type: ignore[call-overload]
            return whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed != ""


def test_a_seed_repeats_an_answer_and_n_gives_several(served: Served) -> None:
    client = served.client()

    def ask(seed: int) -> list[str]:
        answer = client.completions.create(
            model="ensemble", prompt="Return the", max_tokens=16, n=3, seed=seed, temperature=1.5
        )
        return [choice.text for choice in answer.choices]

    assert len(ask(5)) == 3
    assert ask(5) == ask(5)
    assert len({*ask(5), *ask(-6), *ask(2**40)}) > 1


def test_stop_words_end_the_text(served: Served) -> None:
    client = served.client()
    whole = client.completions.create(model="ensemble", prompt="Return the number of", max_tokens=24, temperature=0)
    text = whole.choices[0].text
    word = text[5:9]
    cut = text[: text.index(word)]
    for stream in (False, True):
        answer = client.completions.create(
            model="ensemble", prompt="Return the number of", max_tokens=24, temperature=0, stop=word, stream=stream
        )
        if stream:
            choices = [chunk.choices[0] for chunk in answer]  # type: ignore[attr-defined, union-attr]
            assert ("".join(choice.text for choice in choices), choices[-1].finish_reason) == (cut, "stop")
        else:
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")  # type: ignore[union-attr]


def test_scores_are_of_the_tokens(served: Served) -> None:
    client = served.client()
    chat = client.chat.completions.create(
        model="ensemble", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert chat.usage is not None
    assert len(logprobs.content) == chat.usage.completion_tokens
    for each in logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.logprob == max(top.logprob for top in each.top_logprobs) <= 0
    joined = b"".join(bytes(each.bytes or ()) for each in logprobs.content).decode(errors="replace")
    assert joined.strip() == (chat.choices[0].message.content or "").strip()


def test_a_prompt_is_scored(served: Served, tokenizer: Tokenizer) -> None:
    prompt = "Return the number of items"
    ids = tokenizer.encode(prompt).ids
    scores = []
    for given in (prompt, ids):
        body = {"model": "ensemble", "prompt": given, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        choice = httpx.post(f"{served.url}/completions", json=body, timeout=PATIENCE).json()["choices"][0]
        assert choice["text"].startswith(prompt if given is prompt else f"<|begin_of_text|>{prompt}")
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        assert choice["text"][offsets[2] :].startswith("".join(tokens[2:]))
        scores.append(choice["logprobs"]["token_logprobs"])
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
    assert scores[0] == scores[1]
    assert scores[0][0] is None
    assert all(score <= 0 for score in scores[0][1:])


def test_a_bias_forbids_a_token(served: Served) -> None:
    client = served.client()
    options = {"model": "ensemble", "prompt": "Return the number of", "max_tokens": 1, "temperature": 0, "logprobs": 1}
    first = client.completions.create(**options)  # type: ignore[call-overload]
    scores = httpx.post(f"{served.url}/completions", json=options, timeout=PATIENCE).json()["choices"][0]["logprobs"]
    token = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(scores["tokens"][0]).ids[-1]
    second = client.completions.create(**options, logit_bias={str(token): -100})  # type: ignore[call-overload]
    assert second.choices[0].text != first.choices[0].text


def test_an_end_token_is_neither_text_nor_counted(served: Served) -> None:
    answer = served.client().completions.create(
        model="ensemble", prompt="Return", max_tokens=9, temperature=0, logit_bias={"3": 100}
    )
    assert answer.usage is not None
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("", "stop", 0)


def test_an_answer_that_ignores_end_tokens_has_all_its_tokens(served: Served) -> None:
    answer = served.client().completions.create(
        model="ensemble",
        prompt="Return",
        max_tokens=9,
        temperature=0,
        logit_bias={"3": 100},
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 9)


def test_a_prompt_that_is_too_long_is_said(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().completions.create(model="ensemble", prompt=[5] * 100_000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "100000 tokens" in str(caught.value)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served: Served, stream: bool) -> None:
    port = int(served.url.rsplit(":", 1)[1].split("/")[0])
    # A bias on both end tokens keeps it going; eight answers at once go on for longer.
    values = {"model": "ensemble", "prompt": ["Return the"] * 8, "max_tokens": 100_000, "stream": stream}
    body = json.dumps({**values, "logit_bias": {"1": -100, "3": -100}})

    def holds_blocks() -> bool:
        gauges = served.server.gauges()
        return gauges is not None and gauges.used_blocks > 0

    def departures() -> float:
        """Completions whose client left before they were complete."""
        text = httpx.get(f"{served.url.removesuffix('/v1')}/metrics", timeout=PATIENCE).text
        found = re.search(r'^trtforge_gateway_requests_total\{endpoint="completions",status="499"\} (\S+)', text, re.M)
        return float(found[1]) if found else 0.0

    before = departures()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert eventually(holds_blocks)
    assert eventually(lambda: departures() == before + 1)
    assert eventually(lambda: not holds_blocks())


def test_commands_to_try_are_on_stderr(served: Served) -> None:
    errors = served.server.errors
    assert eventually(lambda: "try:" in errors[:-3])
    at = errors.index("try:")
    curl, infer, python = errors[at + 1 : at + 4]
    assert curl.startswith(f"curl {served.url}/completions ")
    assert infer == f"trtforge infer Hello --url {served.server.grpc}"
    assert f"base_url='{served.url}'" in python
