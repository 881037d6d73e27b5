"""OpenAI's agent framework, which speaks the Responses API, against the gateway."""

import asyncio
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, RunResultStreaming, function_tool
from agents.run import RunConfig
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.conftest import Served

UNTRACED = RunConfig(tracing_disabled=True)
QUESTION = "How is the weather in Rome?"


class Weather(BaseModel):
    """A final answer of an agent."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


def agent(served: Served, called: list[str], **more: Any) -> Agent[Any]:
    """An agent that must call its function first; its calls are kept."""

    @function_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    client = AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0)
    return Agent(
        name="forecaster",
        instructions="Be brief.",
        tools=[weather],
        model=OpenAIResponsesModel("ensemble", client),
        model_settings=ModelSettings(
            tool_choice="weather",
            parallel_tool_calls=False,
            temperature=0,
            extra_body={"stop": [".", "\n"]},  # an agent raises an error for an answer that a limit cuts
        ),
        **more,
    )


def test_an_agent_calls_its_function_and_answers(served: Served) -> None:
    called: list[str] = []
    result = asyncio.run(Runner.run(agent(served, called), QUESTION, run_config=UNTRACED))
    assert called in (["Rome"], ["Oslo"])
    assert [item["type"] for item in result.to_input_list()[1:]] == ["function_call", "function_call_output", "message"]  # type: ignore[typeddict-item]
    assert result.final_output
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.total_tokens) == (2, usage.input_tokens + usage.output_tokens)


def test_an_agent_streams(served: Served) -> None:
    called: list[str] = []

    async def run() -> tuple[str, RunResultStreaming]:
        result = Runner.run_streamed(agent(served, called), QUESTION, run_config=UNTRACED)
        raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return "".join(each.delta for each in raw if each.type == "response.output_text.delta"), result

    text, result = asyncio.run(run())
    assert len(called) == 1
    assert text == result.final_output != ""


def test_an_agent_has_an_output_of_its_class(served: Served) -> None:
    typed = agent(served, [], output_type=Weather).clone(tools=[], model_settings=ModelSettings())
    result = asyncio.run(Runner.run(typed, QUESTION, run_config=UNTRACED))
    assert isinstance(result.final_output, Weather)
