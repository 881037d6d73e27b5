"""Earlier calls of a chat, and their results, in the forms that chat templates expect."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat_templates import QUESTION, Family, refusal, served, write_tokenizer
from trtforge.core.template_messages import TemplateMessages
from trtforge.formats.chat_template import ChatTemplate, read_chat_template

pytestmark = pytest.mark.usefixtures("library")


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "<ä>", "n": [1, 2]}}}
DEEPSEEK_R1 = """{%- for message in messages %}{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<sep>' +
tool['function']['name'] + '\\n' +
tool['function']['arguments'] + '</call>' }}{%- endfor %}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}{{ '<A>' + message['content'] }}{%- endif %}
{%- endfor %}"""


@pytest.mark.parametrize("content", ["", None])
def test_earlier_calls_are_shown_to_templates_that_write_them_as_texts(content: str | None, tmp_path: Path) -> None:
    talk = [
        *QUESTION,
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "assistant", "content": ""},
    ]
    template = served(ChatTemplate(DEEPSEEK_R1, None), tmp_path)
    assert (
        template.chat(json.dumps(talk)).prompt
        == '<｜tool▁call▁begin｜>function<sep>look\n{"at": "<ä>", "n": [1, 2]}</call><A>'
    )


DEEPSEEK_V31 = """{%- for message in messages %}{%- if message['tool_calls'] is defined %}
{%- if message['content'] is not none %}{{ message['content'] }}{%- endif %}
{%- for tool in message['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<sep>' +
tool['function']['arguments'] + '</call>' }}{%- endfor %}{%- else %}{{ '<A>' + message['content'] }}{%- endif %}
{%- endfor %}"""
"""Shows the content of a message and its calls."""


DEEPSEEK_OF_VLLM = """{%- for message in messages %}{%- set content = message['content'] %}
{%- if message['role'] == 'assistant' and '</think>' in content %}{%- set content = content.split('</think>')[-1] %}
{%- endif %}{%- if message['tool_calls'] %}{%- for tool in message['tool_calls'] %}
{{- '' if content is none or loop.index > 1 else content }}{{- '<｜tool▁call▁begin｜>' + tool['function']['name'] }}
{{- tool['function']['arguments']|tojson }}{%- endfor %}{%- else %}{{- '<' + message['role'] + '>' + content }}
{%- endif %}{%- endfor %}"""
"""As vLLM's template for calls of DeepSeek R1: it compares the content with none but fails for it."""


def test_earlier_calls_are_shown_to_templates_that_fail_for_a_content_of_null(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(Family(DEEPSEEK_OF_VLLM, (), "llama"), tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    template = served(chat, tmp_path)
    others = [{"role": "tool", "content": "Found"}, {"role": "assistant", "content": "</think>Done."}]
    for content in ("", None, "Wait."):
        answer = {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}
        given = [*QUESTION, {**answer, "content": content or ""}, *others]
        expected = tokenizer.apply_chat_template(given, tokenize=False)
        assert template.chat(json.dumps([*QUESTION, answer, *others])).prompt == expected
        assert expected.count("<｜tool▁call▁begin｜>look") == 2
    called = {"role": "assistant", "tool_calls": [CALL]}
    assert template.chat(json.dumps([called])).prompt.startswith("<｜tool▁call▁begin｜>look{")


def test_a_content_is_null_beside_calls_that_templates_show_in_both_ways(tmp_path: Path) -> None:
    """As the template of DeepSeek-R1-Distill-Qwen-32B that llama.cpp has."""
    source = (
        "{%- for m in messages %}{%- if m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + m.tool_calls[0].function.name }}"
        "{%- endif %}{%- if m.content is not none %}{{ '<A>' + m.content }}{%- endif %}{%- endfor %}"
    )
    talk = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert served(ChatTemplate(source), tmp_path).chat(json.dumps(talk)).prompt == "<｜tool▁call▁begin｜>look"


def test_calls_beside_text_are_shown_to_deepseeks_templates(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]}
    result_ = {"role": "tool", "content": "Found"}
    talk = [*QUESTION, answer, result_, {"role": "assistant", "content": "Done."}]
    call = '<sep>look\n{"at": "<ä>", "n": [1, 2]}</call>'
    r1 = served(ChatTemplate(DEEPSEEK_R1, None), tmp_path)
    assert r1.chat(json.dumps(talk)).prompt == "<A>Wait." + f"<｜tool▁call▁begin｜>function{call}" * 2 + "<A>Done."
    v31 = served(ChatTemplate(DEEPSEEK_V31, None), tmp_path)
    call = '<｜tool▁call▁begin｜>look<sep>{"at": "<ä>", "n": [1, 2]}</call>'
    assert v31.chat(json.dumps([answer, talk[-1]])).prompt == f"Wait.{call}{call}<A>Done."


@pytest.mark.parametrize(
    "test", ["m.tool_calls and m.content == 'Hi'", "m.tool_calls and m.content is none"], ids=["beside", "apart"]
)
def test_calls_stay_beside_text_if_a_template_refuses_what_tries_it(test: str, tmp_path: Path) -> None:
    refusing = f"{{%- for m in messages %}}{{%- if {test} %}}{{{{ raise_exception('no') }}}}{{%- endif %}}"
    source = f"{refusing}{{{{ m.content ~ '<｜tool▁call▁begin｜>' * (m.tool_calls or [])|length }}}}{{%- endfor %}}"
    answer = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}
    source += "{%- if messages[0].content is none %}{%- endif %}"
    assert served(ChatTemplate(source), tmp_path).chat(json.dumps([answer])).prompt == "Wait.<｜tool▁call▁begin｜>"


def test_gpt_oss_is_shown_what_was_said_between_reasoning_and_a_call(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{%- if m.tool_calls %}{%- if m.content and m.thinking %}{{ raise_exception('both') }}"
        "{%- elif m.content or m.thinking %}{{ '<|channel|>analysis<|message|>' + (m.content or m.thinking) }}"
        "{%- endif %}"
        "{{ '<|channel|>commentary to=functions.' + m.tool_calls[0].function.name }}"
        "{%- else %}{{ m.content }}{%- endif %}{%- endfor %}"
    )
    turn = {"role": "assistant", "reasoning_content": "I ask.", "content": "Let me see.", "tool_calls": [CALL]}
    template = served(ChatTemplate(source, None), tmp_path)
    call = "<|channel|>commentary to=functions.look"
    shown = [
        template.chat(json.dumps([{**turn, **more}])).prompt
        for more in ({}, {"content": ""}, {"reasoning_content": None})
    ]
    head = "<|channel|>analysis<|message|>"
    assert shown == [f"{head}I ask.\n\nLet me see.{call}", f"{head}I ask.{call}", f"{head}Let me see.{call}"]


def called(name: str, identity: str | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {}}} | ({"id": identity} if identity else {})


def test_gpt_oss_is_shown_each_of_several_calls_with_its_results(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{%- if m.tool_calls %}{{ '<|channel|>' + m.thinking|default('') }}"
        "{{ m.tool_calls[0].function.name + (m.tool_calls|length)|string }}"
        "{%- else %}{{ '(' + m.content + ')' }}{%- endif %}{%- endfor %}"
    )
    calls = [called("look", "a"), called("ask", "b"), called("end")]
    turn = {"role": "assistant", "reasoning_content": "I ask.", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": each, "content": each * 2} for each in "bac"]
    template = served(ChatTemplate(source, None), tmp_path)

    def shown(*messages: object) -> str:
        return template.chat(json.dumps(messages)).prompt

    head = "<|channel|>I ask.look1"
    assert shown(turn, *results, QUESTION[0]).startswith(f"{head}(aa)<|channel|>ask1(bb)<|channel|>end1(cc)( What")
    assert shown(turn) == f"{head}<|channel|>ask1<|channel|>end1"
    assert shown(turn, results[0], turn) == f"{head}<|channel|>ask1(bb)<|channel|>end1" + shown(turn)
    assert shown({**turn, "tool_calls": calls[:1]}, *results) == f"{head}(bb)(aa)(cc)"
    for identity in ({}, {"tool_call_id": "x"}):  # none, or the same of all
        alike = [{**call, "id": "x"} if identity else call for call in map(called, ("look", "ask"))]
        results = [{"role": "tool", "content": each, **identity} for each in ("L", "A", "B")]
        assert shown({**turn, "tool_calls": alike}, *results) == f"{head}(L)<|channel|>ask1(A)(B)"


HARMONY = (
    "{%- set last = namespace(name='') %}{%- for m in messages %}{%- if m.tool_calls %}"
    "{%- set last.name = m.tool_calls[0].function.name %}{{ '<|channel|>' + m.thinking|default('') + '>' + last.name }}"
    "{%- elif m.role == 'tool' %}{{ '(' + last.name + '=' + m.content + ')' }}"
    "{%- else %}{{ '[' + m.content + ']' }}{%- endif %}{%- endfor %}"
)
"""As gpt-oss's template names the function of a result: it is that of the last call."""


def reasoned(reasoning: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": list(calls)}


def result(of: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": of.upper()}


def test_gpt_oss_is_shown_results_behind_their_calls_if_reasoning_stands_between_the_calls(tmp_path: Path) -> None:
    template = served(ChatTemplate(HARMONY, None), tmp_path)

    def shown(*messages: object) -> str:
        return template.chat(json.dumps(messages)).prompt.replace("<|channel|>", "|")

    time, weather = reasoned("Time.", called("time", "t")), reasoned("Weather.", called("weather", "w"))
    both = "|Time.>time(time=T)|Weather.>weather(weather=W)"
    assert shown(time, weather, result("t"), result("w")) == shown(time, weather, result("w"), result("t")) == both
    assert shown(time, result("t"), weather, result("w")) == both
    said = {"role": "assistant", "content": "Wait."}
    assert shown(time, said, weather, result("w"), result("t"), said) == (
        "|Time.>time(time=T)[Wait.]|Weather.>weather(weather=W)[Wait.]"
    )
    several = reasoned("Both.", called("time", "a"), called("time", "b"))
    assert shown(several, weather, *map(result, "wba"), weather, result("w")) == (
        "|Both.>time(time=A)|>time(time=B)|Weather.>weather(weather=W)|Weather.>weather(weather=W)"
    )
    assert shown(time, weather, result("w")) == "|Time.>time|Weather.>weather(weather=W)"
    assert shown(time, result("t"), said, result("x")) == "|Time.>time(time=T)[Wait.](time=X)"


DESCRIBED = (
    "{%- for t in tools %}{%- set t = t.function %}{{- '// ' + t.description + '\\n' }}{{- 'type ' + t.name + ';' }}"
    "{%- endfor %}"
)
"""As gpt-oss's template shows functions."""


def test_gpt_oss_is_shown_functions_without_a_description(tmp_path: Path) -> None:
    functions = [{"name": "a"}, {"name": "b", "description": None}, {"name": "c", "description": "See."}]
    request = {"messages": QUESTION, "tools": [{"type": "function", "function": each} for each in functions]}
    made = served(ChatTemplate(DESCRIBED + "<|channel|>"), tmp_path).chat(json.dumps(request))
    assert made.prompt == "// \ntype a;// \ntype b;// See.\ntype c;<|channel|>"
    assert made.tools == request["tools"]
    others = served(ChatTemplate("{{ tools|tojson }}"), tmp_path).chat(json.dumps(request))
    assert json.loads(others.prompt) == request["tools"]
    odd = {"messages": QUESTION, "tools": ["a", {"name": "b"}, {"function": "c"}]}
    shown = served(ChatTemplate("{{ tools|tojson }}<|channel|>"), tmp_path).chat(json.dumps(odd)).prompt
    assert json.loads(shown.removesuffix("<|channel|>")) == odd["tools"]


NAMED = {"type": "function", "function": {"name": "ping"}}
HOST = {"type": "object", "properties": {"host": {"type": "string"}}}
EMPTY = {"type": "object", "properties": {}}


def filled(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "ping", **function}}


@pytest.mark.parametrize(
    ("shown", "tool", "as_if"),
    [
        ("t.parameters|tojson", NAMED, filled(description="", parameters=EMPTY)),
        ("t.description + ';'", NAMED, filled(description="", parameters=EMPTY)),
        ("t.description + t|tojson", filled(parameters=HOST), filled(description="", parameters=HOST)),
        ("t.description + t|tojson", filled(description=None), filled(description="", parameters=EMPTY)),
        (
            "t.parameters.properties.host.description + t|tojson",
            filled(parameters=HOST),
            filled(
                description="",
                parameters={"type": "object", "properties": {"host": {"type": "string", "description": ""}}},
            ),
        ),
        ("t|tojson", NAMED, NAMED),
        ("t.description|default('none')", NAMED, NAMED),
        ("t.parameters", filled(parameters=None), filled(parameters=None)),
    ],
)
def test_templates_that_fail_for_what_functions_lack_are_shown_it_empty(
    shown: str, tool: dict[str, Any], as_if: dict[str, Any], tmp_path: Path
) -> None:
    """As those of Command R, Seed-OSS and Hermes; the others are shown the functions as they are."""
    source = (
        f"{{%- for t in tools %}}{{%- set t = t.function %}}{{{{- t.name + ':' }}}}{{{{- {shown} }}}}{{%- endfor %}}"
    )
    tokenizer = write_tokenizer(Family(source, (), "llama"), tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    full = filled(description="Look.", parameters={"type": "object", "properties": {"host": {"description": "It."}}})
    expected = tokenizer.apply_chat_template(QUESTION, tools=[as_if, full], tokenize=False)
    made = served(chat, tmp_path).chat(json.dumps({"messages": QUESTION, "tools": [tool, full]}))
    assert made.prompt == expected
    assert made.tools == [tool, full]


def test_templates_that_fail_for_other_reasons_fail_for_these(tmp_path: Path) -> None:
    template = served(ChatTemplate("{{ raise_exception('no ' ~ (tools[0].function|default({})|length)) }}"), tmp_path)
    for tools in ([NAMED], ["a", {"name": "b"}, {"function": "c"}], [filled(description="", parameters="x")]):
        assert refusal(template, {"messages": QUESTION, "tools": tools}).startswith(
            "messages: the chat template refuses them: no "
        )
    assert refusal(template, {"messages": QUESTION, "tools": [NAMED]}).endswith("no 1")
    odd = served(ChatTemplate("{{ tools[0].function.description + '' }}"), tmp_path)
    properties = {"type": "object", "properties": {"a": True}}
    asked = {"messages": QUESTION, "tools": [filled(parameters=properties)]}
    assert odd.chat(json.dumps(asked)).prompt == ""


def test_names_of_results_are_shown_as_by_transformers(tmp_path: Path) -> None:
    source = "{%- for m in messages %}{{ m.role + '(' + m.name|default('function') + ')' + m.content }}{%- endfor %}"
    tokenizer = write_tokenizer(Family(source, (), "llama"), tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    for name in ({"name": "look"}, {}):
        talk = [*QUESTION, {"role": "tool", "tool_call_id": "a", "content": "Found", **name}]
        expected = tokenizer.apply_chat_template(talk, tokenize=False)
        assert served(chat, tmp_path).chat(json.dumps(talk)).prompt == expected
        assert expected.endswith("tool(look)Found" if name else "tool(function)Found")


LLAMA = (
    "{%- for m in messages %}{%- if 'tool_calls' in m %}\n"
    "        {%- if TEST %}\n            {{- raise_exception('single calls') }}\n        {%- endif %}\n"
    "{{- '<' + m.tool_calls[0].function.name + '>' }}"
    "{%- elif m.role == 'tool' %}{{- '(' + m.content + ')' }}{%- else %}{{- m.content }}{%- endif %}{%- endfor %}"
)
"""As the templates of Llama 3.1 and 3.2 test the number of calls."""


@pytest.mark.parametrize(
    "test",
    [
        "not m.tool_calls|length == 1",
        "m['tool_calls'] | length != 1",
        "(m.tool_calls|length) > 1",
        "not (m.tool_calls|length == 1)",
    ],
)
def test_llama_is_shown_each_of_several_calls_with_its_results(test: str, tmp_path: Path) -> None:
    template = served(ChatTemplate(LLAMA.replace("TEST", test), None), tmp_path)
    turn = reasoned("", called("time", "t"), called("weather", "w"))
    talk = [turn, result("w"), result("t"), {"role": "assistant", "content": "Done."}, turn]
    assert template.chat(json.dumps(talk)).prompt == "<time>(T)<weather>(W)Done.<time><weather>"


def test_templates_that_take_several_calls_are_shown_them_in_one_message(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{%- if m.tool_calls|length > 1 %}{{ 'several' }}{%- endif %}"
        "{%- if not m.role %}{{ raise_exception('role') }}{%- endif %}{%- endfor %}"
    )
    talk = [reasoned("", called("time", "t"), called("weather", "w"))]
    assert served(ChatTemplate(source, None), tmp_path).chat(json.dumps(talk)).prompt == "several"


def test_kimi_k2_is_shown_ids_that_name_functions(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{%- for c in m.tool_calls or [] %}{{ '<|tool_call_begin|>' + c.id|string }}"
        "{%- endfor %}{{ m.tool_call_id }}{{ m.content }};{%- endfor %}"
    )
    turn = {"role": "assistant", "content": "", "tool_calls": [called("look", "a"), called("ask", "b")]}
    talk = [turn, {"role": "tool", "tool_call_id": "b", "content": "B"}, {**turn, "tool_calls": [called("look", "c")]}]
    talk += [{"role": "tool", "tool_call_id": "c", "content": "C"}, {"role": "tool", "content": "?"}]
    template = served(ChatTemplate(source, None), tmp_path)
    begin = "<|tool_call_begin|>functions."
    assert template.chat(json.dumps(talk)).prompt == (
        f"{begin}look:0{begin}ask:1;functions.ask:1B;{begin}look:2;functions.look:2C;?;"
    )
    twice = [{**turn, "tool_calls": [{**called(name), "id": 1}]} for name in ("look", "ask")]
    twice += [{"role": "tool", "tool_call_id": 1, "content": each} for each in ("L", "A", "B")]
    assert template.chat(json.dumps([*twice, QUESTION[0], *talk[:2]])).prompt.startswith(
        f"{begin}look:0;{begin}ask:1;functions.look:0L;functions.ask:1A;functions.ask:1B; What"
    )
    odd = [
        {"role": "assistant", "content": "", "tool_calls": [None, {"id": "x"}, {"id": "y", "function": {"name": 3}}]}
    ]
    assert template.chat(json.dumps(odd)).prompt == "<|tool_call_begin|><|tool_call_begin|>x<|tool_call_begin|>y;"
    assert template.chat(json.dumps([{**turn, "tool_calls": "ab"}])).prompt == "<|tool_call_begin|>" * 2 + ";"


def test_earlier_calls_are_shown_to_other_templates_as_they_are(tmp_path: Path) -> None:
    source = "{{ messages[0].content }}{% for c in messages[0].tool_calls %}<{{ c.function.arguments.at }}>{% endfor %}"
    talk = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert served(ChatTemplate(source, None), tmp_path).chat(json.dumps(talk)).prompt == "<<ä>>"
    qwen3 = "{% if messages[0].reasoning_content is not none and '</think>' in messages[0].content %}{% endif %}"
    assert served(ChatTemplate(f"{qwen3}{source}", None), tmp_path).chat(json.dumps(talk)).prompt == "<<ä>>"
    broken = served(ChatTemplate("{{ messages[0].content + 5 }}", None), tmp_path)
    assert refusal(broken, talk).startswith("messages: the chat template cannot render them: TypeError: ")


PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is"
    " not none %}{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
"""As the template of microsoft/Phi-4-mini-instruct."""


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        ([], '<|system|><|tool|>[{"name": "ä", "parameters": {}}, {"name": "b"}]<|/tool|><|end|>'),
        (
            [{"role": "system", "content": "Be brief."}],
            '<|system|>Be brief.<|tool|>[{"name": "ä", "parameters": {}}, {"name": "b"}]<|/tool|><|end|>',
        ),
        (
            [{"role": "system", "content": "Be brief.", "tools": "[]"}],
            "<|system|>Be brief.<|tool|>[]<|/tool|><|end|>",
        ),
    ],
)
def test_phi_is_shown_functions_in_the_system_message(system: list[Any], shown: str, tmp_path: Path) -> None:
    template = served(ChatTemplate(PHI), tmp_path)
    tools = [{"type": "function", "function": {"name": "ä", "parameters": {}}}, {"name": "b"}]
    messages = [*system, {"role": "user", "content": "Hi"}]
    asked = template.chat(json.dumps({"messages": messages, "tools": tools})).prompt
    assert asked == f"{shown}<|user|>Hi<|end|>"
    assert template.chat(json.dumps(messages[-1:])).prompt == "<|user|>Hi<|end|>"
    both = "{% if tools %}{{ tools[0].name }}{% endif %}{% for message in messages %}{{ message.tools }}{% endfor %}"
    kimi = served(ChatTemplate(both), tmp_path).chat(json.dumps({"messages": messages[-1:], "tools": tools[1:]}))
    assert kimi.prompt == "b"


BLOCKS = (
    "{%- for m in messages %}{%- if m['role'] == 'assistant' and (m['content'] is none or m['content'] == '') "
    "and not m['tool_calls'] %}{{ raise_exception('empty') }}{%- endif %}"
    "{%- if m['content'] is string and m['content'] != '' %}{{ m['content'] }}"
    "{%- elif m['content'] | length > 0 %}{%- for block in m['content'] %}{%- if block['type'] == 'text' %}"
    "{{ block['text'] }}{%- elif block['type'] == 'thinking' %}{{ '[THINK]' + block['thinking'] + '[/THINK]' }}"
    "{%- endif %}{%- endfor %}{%- endif %}"
    "{%- for c in m['tool_calls'] or [] %}{{ '[TOOL_CALLS]' + c['function']['name'] }}{%- endfor %};{%- endfor %}"
)
"""As the template of mistralai/Ministral-3-14B-Reasoning-2512 shows the content of an answer."""


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": "Four.", "reasoning_content": "I add."}, "[THINK]I add.[/THINK]Four.;"),
        ({"content": "Four.", "reasoning": "I add."}, "[THINK]I add.[/THINK]Four.;"),
        ({"content": "", "reasoning_content": "I add."}, "[THINK]I add.[/THINK];"),
        (
            {"content": "", "reasoning_content": "I ask.", "tool_calls": [CALL]},
            "[THINK]I ask.[/THINK][TOOL_CALLS]look;",
        ),
        (
            {"content": None, "reasoning_content": "I ask.", "tool_calls": [CALL]},
            "[THINK]I ask.[/THINK][TOOL_CALLS]look;",
        ),
        (
            {"content": [{"type": "text", "text": "Four."}], "reasoning_content": "I add."},
            "[THINK]I add.[/THINK]Four.;",
        ),
        ({"content": "Four.", "reasoning_content": ""}, "Four.;"),
        ({"content": "Four."}, "Four.;"),
        ({"role": "user", "content": "Four.", "reasoning_content": "I add."}, "Four.;"),
    ],
)
def test_reasoning_is_shown_to_templates_that_read_it_as_a_block(
    message: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    message = {"role": "assistant", **message}
    assert served(ChatTemplate(BLOCKS), tmp_path).chat(json.dumps([message])).prompt == shown


def test_an_answer_in_blocks_is_continued(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "Fo", "reasoning_content": "I add."}
    asked = {"messages": [message], "continue_final_message": True}
    assert served(ChatTemplate(BLOCKS), tmp_path).chat(json.dumps(asked)).prompt == "[THINK]I add.[/THINK]Fo"


def test_templates_that_name_the_reasoning_get_no_blocks(tmp_path: Path) -> None:
    source = "{{ messages[0].reasoning_content }}{% if messages[0].content[0].type == 'thinking' %}block{% endif %}"
    message = {"role": "assistant", "content": "Four.", "reasoning_content": "I add."}
    assert served(ChatTemplate(source), tmp_path).chat(json.dumps([message])).prompt == "I add."


NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{%- if c.id is not defined or c.id|length != 9 %}{{ raise_exception('nine letters') }}{% endif %}[{{ c.id }}]"
    "{% endfor %}{% if m.role == 'tool' %}{{ '<' + m.tool_call_id + '>' }}{% endif %}{% endfor %}"
)
"""As the template of mistralai/Mistral-Nemo-Instruct-2407 tests ids."""
IDS = ("call_b731232066485d4eaf125b72", "nine-char", "abcDEF123")


def test_calls_have_the_ids_that_mistrals_templates_take(tmp_path: Path) -> None:
    template = served(ChatTemplate(NINE), tmp_path)
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": {}}} for each in IDS]
    results = [{"role": "tool", "tool_call_id": each, "content": ""} for each in (IDS[2], IDS[0], IDS[1])]
    unnamed = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    messages = [*QUESTION, {"role": "assistant", "tool_calls": calls}, *results, unnamed, {"role": "tool"}]
    first, second = (hashlib.sha256(each.encode()).hexdigest()[:9] for each in IDS[:2])
    shown = template.chat(json.dumps(messages)).prompt
    assert shown == f"[{first}][{second}][abcDEF123]<abcDEF123><{first}><{second}>[000000003]<000000003>"


def test_models_of_an_older_package_render_with_todays_messages() -> None:
    """As lib/chat_template.py of trtforge 0.2.1 does; it imports what is installed."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [{"role": "assistant", "tool_calls": calls, "content": None}]
    seen = TemplateMessages("{{ tool_call.id|length != 9 }}").rendered(lambda shown: json.dumps(shown), messages)
    assert json.loads(seen) == [{"role": "assistant", "tool_calls": [{**calls[0], "id": "000000000"}]}]


def test_results_of_calls_that_were_left_out_have_short_ids_too(tmp_path: Path) -> None:
    template = served(
        ChatTemplate("{% if 0 and tool_call.id|length != 9 %}{% endif %}{{ messages[0].tool_call_id }}"), tmp_path
    )
    shown = template.chat(json.dumps([{"role": "tool", "tool_call_id": "call_12", "content": "3"}])).prompt
    assert shown.endswith(hashlib.sha256(b"call_12").hexdigest()[:9])


def test_single_calls_of_llama_stay_where_they_are(tmp_path: Path) -> None:
    source = "{% if not m.tool_calls|length == 1 %}{{ raise_exception('one') }}{% endif %}"
    shows = "{% for m in messages %}{{ m.role[0] }}{% endfor %}"
    template = served(ChatTemplate(f"{{% if 0 %}}{source}{{% endif %}}{shows}"), tmp_path)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    asked = {"role": "assistant", "tool_calls": [call]}
    messages = [asked, {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "a", "content": "3"}]
    assert template.chat(json.dumps(messages)).prompt == "aut"
    two = [{**asked, "tool_calls": [call, {**call, "id": "b"}]}, *messages[2:]]
    assert template.chat(json.dumps(two)).prompt == "ata"
