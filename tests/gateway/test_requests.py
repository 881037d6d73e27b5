"""OpenAI's requests as requests to a text model: what is passed on, what is refused, and by which field."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.gateway.chat import KNOWN as CHAT_KNOWN
from trtforge.gateway.chat import read_chat
from trtforge.gateway.completions import KNOWN as COMPLETION_KNOWN
from trtforge.gateway.completions import read_completion
from trtforge.gateway.errors import ApiError
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.request import Sampling, TextRequest
from trtforge.gateway.sampling_fields import MOST_TOKENS

LIMITS = GatewayLimits()
USER = {"role": "user", "content": "Hello"}
SAID = {"role": "assistant", "content": "Hi"}
STRICTLY = {"type": "function", "function": {"name": "f", "strict": "x"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SAMPLED = Sampling(temperature=1.0, top_p=1.0)


def allowed(mode: str, name: str) -> dict[str, object]:
    """A choice of tools that lists those that may be called."""
    function = {"type": "function", "function": {"name": name}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function]}}


def chat(**values: object) -> TextRequest:
    return read_chat({"model": "m", "messages": [USER], **values}, LIMITS).request


def completion(**values: object) -> TextRequest:
    (request,) = read_completion({"model": "m", "prompt": "Hello", **values}, LIMITS).requests
    return request


def refusal(read: Any, values: Mapping[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(values, LIMITS)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_those_of_openai() -> None:
    assert chat() == TextRequest("m", MOST_TOKENS, messages='[{"role": "user", "content": "Hello"}]', sampling=SAMPLED)
    assert completion() == TextRequest("m", 16, prompt="Hello", sampling=SAMPLED)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0}, Sampling()),
        ({"temperature": 0, "top_p": 0.5}, Sampling()),
        ({"top_p": 0}, Sampling()),
        ({"top_k": 1}, Sampling()),
        ({"temperature": 0.5}, Sampling(0.5, 1.0)),
        ({"top_p": 0.5}, Sampling(1.0, 0.5)),
        ({"top_k": 40}, Sampling(1.0, 1.0, 40)),
        ({"top_k": -1}, SAMPLED),
        ({"seed": -3}, Sampling(1.0, 1.0, seed=-3)),
        ({"presence_penalty": 0, "frequency_penalty": -1}, Sampling(1.0, 1.0, frequency_penalty=-1.0)),
        ({"logit_bias": {"5": -100, "17": 2.5}}, Sampling(1.0, 1.0, logit_bias='{"5":-100.0,"17":2.5}')),
        ({"priority": 0}, Sampling(1.0, 1.0, priority=0.0)),
        ({"cache_salt": "tenant 1"}, Sampling(1.0, 1.0, cache_salt="tenant 1")),
        ({"cache_salt": None}, SAMPLED),
        ({"min_p": 0.25, "no_repeat_ngram_size": 3}, Sampling(1.0, 1.0, min_p=0.25, no_repeat_ngram_size=3)),
        ({"ignore_eos": True, "min_tokens": 3}, Sampling(1.0, 1.0, min_tokens=MOST_TOKENS)),
        ({"ignore_eos": False, "min_tokens": 3}, Sampling(1.0, 1.0, min_tokens=3)),
        ({"prompt_ignore_length": 4, "min_p": 0}, Sampling(1.0, 1.0, prompt_ignore_length=4)),
        ({"logit_bias": {}, "n": None, "stop": None}, SAMPLED),
    ],
)
def test_sampling(given: Mapping[str, Any], expected: Sampling) -> None:
    assert chat(**given).sampling == completion(**given).sampling == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"max_tokens": 7}, 7), ({"max_completion_tokens": 8}, 8), ({"max_completion_tokens": 8, "max_tokens": 9}, 8)],
)
def test_chat_takes_both_limits_of_tokens(given: Mapping[str, Any], expected: int) -> None:
    assert chat(**given).max_tokens == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), ("", ()), (["", "x"], ("x",)), (None, ())],
)
def test_stop_words(given: object, expected: tuple[str, ...]) -> None:
    assert chat(stop=given).stop == completion(stop=given).stop == expected


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": "So:", "refusal": None, "tool_calls": []}, "So:"),
        ({"content": None, "refusal": None, "tool_calls": []}, ""),
    ],
)
def test_earlier_answers_are_taken_as_openais_client_gives_them(given: dict[str, object], content: str) -> None:
    asked = {"role": "user", "content": "Hi"}
    request = chat(messages=[asked, {"role": "assistant", **given}])
    assert json.loads(request.messages or "") == [asked, {"role": "assistant", "content": content}]


def test_requests_without_a_seed_get_one_each_if_tokens_are_drawn() -> None:
    """Engines take 0 where none is given."""
    seeds = {chat().sampling.seeded().seed for _ in range(20)}
    assert len(seeds) > 10
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert chat(temperature=0).sampling.seeded().seed is None
    assert chat(seed=7).sampling.seeded() == chat(seed=7).sampling


def test_contents_become_text_and_developers_the_system() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    request = chat(
        messages=[{"role": "developer", "content": "Be brief", "name": "x"}, {"role": "user", "content": parts}]
    )
    assert json.loads(request.messages or "") == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "one two"},
    ]


def test_options_of_the_template_are_passed_on() -> None:
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}}
    assert json.loads(chat(**options).messages or "") == {"messages": [USER], **options}


@pytest.mark.parametrize(
    ("given", "reaches"),
    [
        ({}, {"reasoning_effort": "low"}),
        ({"enable_thinking": True}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    ],
)
def test_the_effort_of_reasoning_is_a_variable_of_the_template(
    given: Mapping[str, Any], reaches: Mapping[str, Any]
) -> None:
    found = json.loads(chat(reasoning_effort="low", chat_template_kwargs=given).messages or "")
    assert found == {"messages": [USER], "chat_template_kwargs": reaches}


@pytest.mark.parametrize(
    ("given", "reaches", "thinks"),
    [
        ({}, {"reasoning_effort": "none", "enable_thinking": False}, False),
        ({"enable_thinking": True}, {"reasoning_effort": "none", "enable_thinking": True}, True),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": False}, False),
    ],
)
def test_no_effort_of_reasoning_turns_thinking_off_unless_the_template_is_told_otherwise(
    given: Mapping[str, Any], reaches: Mapping[str, Any], thinks: bool
) -> None:
    values = {"model": "m", "messages": [USER], "reasoning_effort": "none", "chat_template_kwargs": given}
    call = read_chat(values, LIMITS)
    assert json.loads(call.request.messages or "") == {"messages": [USER], "chat_template_kwargs": reaches}
    assert call.thinks is thinks


def test_documents_are_passed_on() -> None:
    documents = [{"title": "a", "text": "b"}]
    assert json.loads(chat(documents=documents).messages or "") == {"messages": [USER], "documents": documents}
    given = {"chat_template_kwargs": {"documents": documents}}
    assert json.loads(chat(**given).messages or "") == {"messages": [USER], **given}


@pytest.mark.parametrize(("name", "kept"), [("look", {"name": "look"}), (None, {}), (3, {})])
def test_names_of_results_are_passed_on(name: object, kept: Mapping[str, str]) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    request = chat(messages=[USER, {**result, "name": name}])
    assert json.loads(request.messages or "") == [USER, {**result, **kept}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
def test_prompts(prompt: object, expected: list[object]) -> None:
    call = read_completion({"model": "m", "prompt": prompt, "n": 2}, LIMITS)
    assert [request.prompt for request in call.requests] == expected
    assert {request.sequences for request in call.requests} == {2}


def test_scores_of_the_prompt_are_asked_for_where_they_are_needed() -> None:
    assert not completion(echo=True).prompt_logprobs
    assert completion(echo=True, logprobs=1).prompt_logprobs
    assert completion(echo=True, prompt=[1, 2]).prompt_logprobs
    assert not completion(logprobs=3).prompt_logprobs
    assert (completion(logprobs=3).logprobs, completion(logprobs=3).top_logprobs) == (True, 3)
    assert (completion(logprobs=0).logprobs, completion(logprobs=0).top_logprobs) == (True, 0)
    assert (chat(logprobs=True).top_logprobs, chat(logprobs=True, top_logprobs=4).top_logprobs) == (0, 4)


def test_the_prompt_alone_can_be_scored() -> None:
    call = read_completion({"model": "m", "prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1}, LIMITS)
    assert call.nothing_new
    assert call.requests[0].max_tokens == 1


@pytest.mark.parametrize(
    "given",
    [
        {"user": "x", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": []},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"reasoning_effort": None, "unheard_of": None},
    ],
)
def test_fields_without_effect_are_ignored(given: Mapping[str, Any]) -> None:
    assert chat(**given) == chat()


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"model": None}, "model", "you must provide the parameter model"),
        ({"model": 5}, "model", "model must be a non-empty string, not 5"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt must be a non-empty string, not an empty string"),
        ({"cache_salt": 5}, "cache_salt", "cache_salt must be a non-empty string, not 5"),
        ({"cache_salt": "a" * 1025}, "cache_salt", "cache_salt has 1025 characters, at most 1024 are accepted"),
        ({"messages": None}, "messages", "you must provide"),
        ({"messages": []}, "messages", "non-empty array, not an array of 0"),
        ({"messages": ["hi"]}, "messages[0]", "an object, not a string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "not null"),
        (
            {"messages": [{"role": "wizard", "content": "a"}]},
            "messages[0].role",
            "developer, user, assistant, tool",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "must be a non-empty string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "parts of type 'image_url' are not supported, this model takes text",
        ),
        ({"temperature": 2.1}, "temperature", "a number from 0 to 2, not 2.1"),
        ({"temperature": "hot"}, "temperature", "not a string"),
        ({"temperature": float("nan")}, "temperature", "a number from 0 to 2, not nan"),
        ({"min_p": 10**400}, "min_p", "a number from 0 to 1, not 1000000000000000000000000000000000000000"),
        ({"ignore_eos": "yes"}, "ignore_eos", "ignore_eos must be true or false"),
        ({"min_p": True}, "min_p", "a number from 0 to 1, not true"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size", "a whole number from 0 to 1073741824, not 1.5"),
        ({"prompt_ignore_length": [3]}, "prompt_ignore_length", "not an array of 1"),
        ({"top_p": True}, "top_p", "not true"),
        ({"n": 0}, "n", "a whole number from 1 to 128, not 0"),
        ({"n": 1.5}, "n", "not 1.5"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to"),
        ({"stop": ["a"] * 17}, "stop", "17 strings, at most 16"),
        ({"stop": [5]}, "stop", "a string or an array of strings"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream is true"),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "stream_options.include_usage?",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"logit_bias": {"word": 1}}, "logit_bias", "must be token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object, not null"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "an object, not null",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "must be text, json_object or json_schema"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "an object of type function with a function"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "two functions named weather"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [TOOL] * 129}, "tools", "an array of at most 128 tools, not an array of 129"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed when tools are given"),
        (
            {"tools": [TOOL], "tool_choice": "always"},
            "tool_choice",
            "must be none, auto, required, an object",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sun"}}},
            "tool_choice",
            "not in tools",
        ),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "sun")}, "tool_choice", "must name functions that are in"),
        ({"tools": [TOOL], "tool_choice": allowed("none", "weather")}, "tool_choice", "must be none, auto, required"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "a string or an array"),
        ({"messages": [{"role": "assistant", "content": None, "refusal": 5}]}, "messages[0].refusal", "not 5"),
        ({"messages": [{**SAID, "tool_calls": {}}]}, "messages[0].tool_calls", "an array of at most"),
        ({"messages": [{**SAID, "tool_calls": 0}]}, "messages[0].tool_calls", "calls, not 0"),
        ({"messages": [{**SAID, "reasoning_content": False}]}, "messages[0].reasoning_content", "a string, not false"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls", "true or false, not 0"),
        ({"tools": [STRICTLY]}, "tools[0].function.strict", "true or false, not a string"),
        ({"functions": [{"name": "f"}]}, "functions", "functions is not supported; send tools"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"documents": {}}, "documents", "must be an array of objects, not an object"),
        ({"documents": ["a"]}, "documents", "must be an array of objects, not an array of 1"),
        ({"reasoning_effort": "lots"}, "reasoning_effort", "must be one of none, minimal, low, medium, high, xhigh"),
        (
            {"temprature": 1},
            "temprature",
            "unrecognized request argument supplied: 'temprature'; did you mean temperature?",
        ),
    ],
)
def test_refused_chats_name_the_field(given: Mapping[str, Any], param: str, said: str) -> None:
    error = refusal(read_chat, {"model": "m", "messages": [USER], **given})
    assert error.param == param
    assert said in error.message


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"prompt": None}, "prompt", "you must provide"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": []}, "prompt", "non-empty array"),
        ({"prompt": [[]]}, "prompt", "an empty array"),
        ({"prompt": [1, "a"]}, "prompt", "mixes"),
        ({"prompt": [-1]}, "prompt", "whole numbers from 0"),
        ({"prompt": [True]}, "prompt", "whole numbers from 0"),
        ({"prompt": {"a": 1}}, "prompt", "not an object"),
        ({"prompt": ["a"] * 1025}, "prompt", "1025 items, at most 1024"),
        ({"prompt": ["a"] * 100, "n": 20}, "n", "prompts times n is 2000"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"suffix": 0}, "suffix", "not supported"),
        ({"stop": {}}, "stop", "a string or an array of strings, not an object"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"max_tokens": 0}, "max_tokens", "only allowed with echo"),
        ({"logprobs": True}, "logprobs", "from 0 to 20, not true"),
        ({"messages": [USER]}, "messages", "unrecognized"),
    ],
)
def test_refused_completions_name_the_field(given: Mapping[str, Any], param: str, said: str) -> None:
    error = refusal(read_completion, {"model": "m", "prompt": "Hello", **given})
    assert error.param == param
    assert said in error.message


def test_best_of_that_chooses_nothing_is_accepted() -> None:
    assert completion(best_of=2, n=2).sequences == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(CHAT_KNOWN)), JSON, max_size=6))
def test_any_chat_is_read_or_refused_with_a_field(values: dict[str, Any]) -> None:
    check({"model": "m", "messages": [USER], **values}, read_chat)


@given(st.dictionaries(st.sampled_from(sorted(COMPLETION_KNOWN)), JSON, max_size=6))
def test_any_completion_is_read_or_refused_with_a_field(values: dict[str, Any]) -> None:
    check({"model": "m", "prompt": "Hello", **values}, read_completion)


def check(values: dict[str, Any], read: Any) -> None:
    refused: ApiError | None = None
    requests: tuple[TextRequest, ...] = ()
    try:
        call = read(values, LIMITS)
        requests = getattr(call, "requests", None) or (call.request,)
    except ApiError as error:
        refused = error
    if refused is not None:
        assert (refused.status, bool(refused.param)) == (400, True)
        assert json.loads(refused.body())["error"]["type"] == "invalid_request_error"
    for request in requests:
        assert request.max_tokens >= 1
        assert 1 <= request.sequences <= LIMITS.sequences
        assert (request.prompt is None) != (request.messages is None)


@given(
    st.floats(0, 2), st.floats(0.001, 1), st.integers(-(2**63), 2**63 - 1), st.floats(-2, 2), st.floats(-2, 2),
    st.lists(st.text(min_size=1, max_size=9), max_size=4), st.integers(1, 100000),
)  # fmt: skip
def test_every_value_reaches_the_model(
    temperature: float, top_p: float, seed: int, presence: float, frequency: float, stop: list[str], tokens: int
) -> None:
    request = chat(
        temperature=temperature, top_p=top_p, seed=seed, presence_penalty=presence, frequency_penalty=frequency,
        stop=stop, max_completion_tokens=tokens,
    )  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p) == ((None, None) if temperature == 0 else (temperature, top_p))
    assert (sampling.seed, sampling.presence_penalty or 0, sampling.frequency_penalty or 0) == (
        seed,
        presence,
        frequency,
    )
    assert (list(request.stop), request.max_tokens) == (stop, tokens)
