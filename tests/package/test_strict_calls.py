"""Guides of calls of strict functions: they allow calls that the gateway reads, with arguments of the schema."""

import json
import re
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from trtforge.core.strict_calls import PROBE, PROBE_PROMPT, StrictCalls
from trtforge.gateway.tool_calls import split
from trtforge.gateway.tools import ToolUse
from trtforge.runtime.guidance.tags import enforceable_tag

pytestmark = pytest.mark.usefixtures("library")

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F", None]},
        "places": {"type": "array", "items": {"type": "string"}},
        "wind": {"$ref": "#/$defs/Wind"},
    },
    "required": ["city", "days", "unit", "places", "wind"],
    "additionalProperties": False,
    "$defs": {
        "Wind": {
            "type": "object",
            "properties": {"from": {"type": ["string", "null"]}, "fast": {"type": "boolean"}},
            "required": ["from", "fast"],
            "additionalProperties": False,
        }
    },
}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
FREE = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "required": ["zone"]}}}
NOTHING = {"type": "function", "function": {"name": "now", "strict": True}}
TOOLS = [STRICT, FREE, NOTHING]
USE = ToolUse("auto", ("weather", "time", "now"), True, {"weather": WEATHER})
VALUES = {"city": "Rome", "days": 3, "unit": None, "places": ["a"], "wind": {"from": "N", "fast": True}}
ARGUMENTS = json.dumps(VALUES)
ASKED = """{{ 'Write <tool_call>{"name": "a", "arguments": {}}</tool_call> or <tool_call>.' if tools }}"""
WRITTEN = {
    "hermes": """{{ '<tool_call>\n' }}{{ '{"name": "' + c.name + '", "arguments": ' }}{{ c.arguments | tojson }}}
</tool_call>""",
    "on one line": """<tool_call>{"name":"{{ c.name }}","arguments":{{ c.arguments | tojson }}}</tool_call>""",
    "coder": """<tool_call>
<function={{ c.name }}>{% for key, value in c.arguments.items() %}

<parameter={{ key }}>
{{ value }}
</parameter>{% endfor %}

</function>
</tool_call>""",
    "glm": """<tool_call>{{ c.name }}
{% for key, value in c.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>
{% endfor %}
</tool_call>""",
    "deepseek v3": """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}
```json
{{ c.arguments | tojson }}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "deepseek v3.1": """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>\
{{ c.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "kimi": """<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>\
{{ c.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>""",
    "minimax": """<minimax:tool_call>
<invoke name="{{ c.name }}">
{% for key, value in c.arguments.items() %}<parameter name="{{ key }}">{{ value }}</parameter>
{% endfor %}</invoke>
</minimax:tool_call>""",
    "in bars": """<|tool_call|>{{ c | tojson }}<|/tool_call|>""",
    "nemotron": """<TOOLCALL>[{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}{{ '}]</TOOLCALL>' }}""",
    "typed": """<tool_call>{"type": "function", "name": "{{ c.name }}", \
"arguments": {{ c.arguments | tojson }}}</tool_call>""",
    "apriel": """<tool_calls>[{"name": "{{ c.name }}", \
"arguments": {{ c.arguments | tojson }}{{ '}]</tool_calls>' }}""",
    "seed": """<seed:tool_call>
<function={{ c.name }}>
{% for key, value in c.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>
{% endfor %}</function>
</seed:tool_call>""",
    "cohere": """<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}
]<|END_ACTION|>""",
    "command r": """Action: ```json
[
    {
        "tool_name": "{{ c.name }}",
        "parameters": {{ c.arguments | tojson }}
    }
]```""",
    "dsml": """<｜DSML｜function_calls>
<｜DSML｜invoke name="{{ c.name }}">
{% for key, value in c.arguments.items() %}\
<｜DSML｜parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">{{ value }}\
</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
</｜DSML｜function_calls>""",
    "lfm": """<|tool_call_start|>[{{ c.name }}()]<|tool_call_end|>""",
    "gemma": """<|tool_call>call:{{ c.name }}{}<tool_call|>""",
    "mistral": """[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}""",
    "gpt-oss": """<|channel|>commentary to=functions.{{ c.name }}<|message|>{{ c.arguments | tojson }}<|call|>""",
    "arguments first": """<tool_call>{"arguments": {{ c.arguments | tojson }}, "name": "{{ c.name }}"}</tool_call>""",
    "llama": """{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}""",
    "refuses": "{{ raise_exception('no calls') }}",
}
"""How templates in the formats of these families write a call."""
FORMS = (
    "hermes",
    "on one line",
    "coder",
    "glm",
    "deepseek v3",
    "deepseek v3.1",
    "kimi",
    "minimax",
    "in bars",
    "nemotron",
    "typed",
    "apriel",
    "seed",
    "cohere",
    "dsml",
)
TAGGED = "".join(
    f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
    for name, value in VALUES.items()
)
KEYED = "".join(
    f"<arg_key>{name}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
    for name, value in VALUES.items()
)
NAMED = "".join(
    f'<parameter name="{name}">{value if isinstance(value, str) else json.dumps(value)}</parameter>\n'
    for name, value in VALUES.items()
)
TYPED = "".join(
    f'<｜DSML｜parameter name="{name}" string="true">{value}</｜DSML｜parameter>\n'
    if isinstance(value, str)
    else f'<｜DSML｜parameter name="{name}" string="false">{json.dumps(value)}</｜DSML｜parameter>\n'
    for name, value in VALUES.items()
)
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "on one line": f'<tool_call>{{"name":"weather","arguments":{ARGUMENTS}}}</tool_call>',
    "coder": f"<tool_call>\n<function=weather>\n{TAGGED}</function>\n</tool_call>",
    "glm": f"<tool_call>weather\n{KEYED}</tool_call>",
    "deepseek v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek v3.1": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:10<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "minimax": f'<minimax:tool_call>\n<invoke name="weather">\n{NAMED}</invoke>\n</minimax:tool_call>',
    "in bars": f'<|tool_call|>{{"name": "weather", "arguments": {ARGUMENTS}}}<|/tool_call|>',
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {ARGUMENTS}}}]</TOOLCALL>',
    "typed": f'<tool_call>{{"type": "function", "name": "weather", "arguments": {ARGUMENTS}}}</tool_call>',
    "apriel": f'<tool_calls>[{{"name": "weather", "arguments": {ARGUMENTS}}}]</tool_calls>',
    "seed": f"<seed:tool_call>\n<function=weather>\n{TAGGED}</function>\n</seed:tool_call>",
    "cohere": f"""<|START_ACTION|>[
    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}}
]<|END_ACTION|>""",
    "dsml": (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n{TYPED}</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
}
NOW = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "on one line": '<tool_call>{"name":"now","arguments":{}}</tool_call>',
    "coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>now\n</tool_call>",
    "deepseek v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
    "deepseek v3.1": "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "minimax": '<invoke name="now">\n</invoke>',
    "in bars": '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
    "nemotron": '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>',
    "typed": '<tool_call>{"type": "function", "name": "now", "arguments": {}}</tool_call>',
    "apriel": '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>',
    "seed": "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "cohere": """<|START_ACTION|>[
    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}
]<|END_ACTION|>""",
    "dsml": '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
}
ENDS = ("</｜DSML｜parameter>", "</parameter>", "</arg_value>", '"', "<", "}", "]")
CHARACTERS = ["", *map(chr, range(32, 127)), "\n", "é", "｜", "▁", *ENDS[:3]]
VOCABULARY = xgrammar.TokenizerInfo(
    [text.encode() for text in CHARACTERS], xgrammar.VocabType.RAW, vocab_size=len(CHARACTERS), stop_token_ids=[]
)


def tokenizer_with(*special: str) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def guide_of(
    name: str,
    tools: Any = TOOLS,
    prompt: str = "",
    *,
    continues: bool = False,
    thinks: bool = False,
    think: str = "<think>",
    special: tuple[str, ...] = (),
    said: dict[str, Any] | None = None,
    role: str = "",
) -> str | None:
    """The guide of a model whose template writes calls so; `thinks`: it knows thoughts, after `think`."""
    from chat_template import ChatTemplate  # type: ignore[import-not-found]
    from responder import RequestFailed  # type: ignore[import-not-found]

    calls = f"{{% for call in m.tool_calls or [] %}}{{% set c = call.function %}}{WRITTEN[name]}{{% endfor %}}"
    begins = f"{think if thinks else ''}{{{{ '{role}' if m.role == 'assistant' }}}}"
    template = f"{ASKED}{{% for m in messages %}}{begins}{{{{ m.content }}}}{calls}{{% endfor %}}"
    template += f"{{{{ '{role}' if add_generation_prompt }}}}"
    chats = ChatTemplate({"template": template, "special_tokens": {}})
    try:
        shown = chats.chat(json.dumps(PROBE)).prompt
    except RequestFailed:
        shown = ""
    begun = chats.chat(json.dumps(PROBE_PROMPT)).prompt
    calls = StrictCalls(template, shown, tokenizer_with(*special), begun)
    return calls.guide(tools, prompt, continues=continues, said=said)


def matcher_of(guide: str | None) -> Any:
    assert guide is not None
    compiler = xgrammar.GrammarCompiler(VOCABULARY)
    grammar = compiler.compile_structural_tag(json.dumps(enforceable_tag(json.loads(guide))))
    return xgrammar.GrammarMatcher(grammar, override_stop_tokens=[0])


def allows(guide: str | None, text: str) -> bool:
    """Whether the whole of an answer may be this text."""
    matcher = matcher_of(guide)
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize("name", FORMS)
def test_a_call_in_the_form_of_the_template_keeps_to_its_schema(name: str) -> None:
    guide, call = guide_of(name), CALLS[name]
    for text in ("It rains.", f"I ask. {call}", f"{call}\n{NOW[name]}", NOW[name], call.replace("3", "-12")):
        assert allows(guide, text), text
    for wrong in (
        call.replace("weather", "rain"),
        call.replace("3", "three"),
        call.replace("city", "town"),
        call.replace("true", "1"),
        NOW[name].replace("now", "weather"),
    ):
        assert not allows(guide, wrong), wrong
    _, calls = split(USE, f"{call}\n{NOW[name]}", "stop")
    assert [(each.name, json.loads(each.arguments)) for each in calls] == [("weather", VALUES), ("now", {})]


SAID = {
    "type": "object",
    "properties": {"rains": {"type": "boolean"}},
    "required": ["rains"],
    "additionalProperties": False,
}
FREE = [{"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize("role", ["", "<｜Assistant｜>"])  # no special token in some tokenizers of DeepSeek
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_json_of_the_requested_schema_or_calls(name: str, role: str) -> None:
    """As OpenAI's API has it: the format is that of messages, and the model may call functions instead."""
    call, now = CALLS[name], NOW[name]
    guide = guide_of(name, said=SAID, role=role)
    for text in ('{"rains": true}', call, f"{call}\n{now}", now):
        assert allows(guide, text), text
    for wrong in ("It rains.", "{}", f"I ask. {call}", f'{{"rains": true}}{call}', call.replace("3", "three"), ""):
        assert not allows(guide, wrong), wrong
    assert not role or not allows(guide, f"{role}{call}")
    assert [each.name for each in split(USE, f"{call}\n{now}", "stop")[1]] == ["weather", "now"]
    free = guide_of(name, FREE, said=SAID)  # no function needs to be strict
    assert allows(free, now)
    assert allows(free, '{"rains": false}')
    assert guide_of(name, (), said=SAID) is None


def test_calls_of_an_array_are_numbered_and_separated_as_the_template_writes_them() -> None:
    guide, call, now = guide_of("cohere"), CALLS["cohere"].removesuffix("\n]<|END_ACTION|>"), NOW["cohere"]
    rest = now.removeprefix("<|START_ACTION|>[")
    for text in (f"{call},{rest}", f"{call.replace('0', '12')},{rest}"):
        assert allows(guide, text)
        assert [each.name for each in split(USE, text, "stop")[1]] == ["weather", "now"]
    for wrong in (f"{call}{rest}", f"{call}, {rest.strip()}", call, f"{call.replace('0', 'a')},{rest}"):
        assert not allows(guide, wrong)


def test_an_array_may_have_several_calls() -> None:
    guide, call, now = (
        guide_of("nemotron"),
        CALLS["nemotron"].removesuffix("]</TOOLCALL>"),
        '{"name": "now", "arguments": {}}',
    )
    text = f"I ask. {call}, {now}]</TOOLCALL>"
    assert allows(guide, text)
    assert [each.name for each in split(USE, text, "stop")[1]] == ["weather", "now"]
    for wrong in (f"{call}, {now}", f"{call}, {now.replace('{}', '{1}')}]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>"):
        assert not allows(guide, wrong)


@pytest.mark.parametrize("name", FORMS)
def test_other_functions_of_the_request_take_any_arguments(name: str) -> None:
    guide = guide_of(name)
    assert allows(guide, CALLS[name].replace("weather", "time").replace("city", "town"))
    assert allows(guide, NOW[name].replace("now", "time"))


@pytest.mark.parametrize("name", FORMS)
@given(st.integers(0, 2**32))
def test_whatever_a_guide_allows_is_a_call_with_valid_arguments(name: str, seed: int) -> None:
    begun = CALLS[name].partition("weather")[0] + "weather"
    text = begun + _some_end(matcher_of(guide_of(name, [STRICT])), begun, Random(seed))
    _, calls = split(ToolUse("auto", ("weather",), True, {"weather": WEATHER}), text, "stop")
    assert {call.name for call in calls} == {"weather"}, text
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), WEATHER)


def _some_end(matcher: Any, begun: str, random: Random) -> str:
    """How the guide lets a text go on, token by token, until it may end. What ends a value becomes likely in time."""
    assert matcher.accept_string(begun)
    mask, text = xgrammar.allocate_token_bitmask(1, len(CHARACTERS)), ""
    while not matcher.is_completed():
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(CHARACTERS)]
        allowed = [CHARACTERS[index] for index in np.flatnonzero(bits)]
        ends = [each for each in ENDS if each in allowed] if random.random() < len(text) / 200 else []
        token = random.choice(ends or allowed)
        assert matcher.accept_token(CHARACTERS.index(token))
        text += token
    return text


def test_thoughts_are_free() -> None:
    call, thought = CALLS["hermes"], "I may write <tool_call>now. "
    for prompt, continues, begin in (
        ("user: Hi", False, "<think>"),
        ("<think>a</think>Hi", True, "\n<think>"),
        ("assistant: <think>\n", False, ""),
        ("assistant: <think>I pon", True, "der. "),
    ):
        guide = guide_of("hermes", prompt=prompt, continues=continues, thinks=True)
        assert allows(guide, f"{begin}{thought}</think>{call}")
        assert not allows(guide, f"{begin}{thought}</think><tool_call>now")
        assert allows(guide, f"{begin}I may call. ")
        assert allows(guide, f"{begin}I call. {call} {NOW['hermes']}")
        for unfinished in (thought, call.replace("3", "three")):  # the gateway could take it for a call
            assert not allows(guide, f"{begin}{unfinished}")
            assert allows(guide, f"{begin}{unfinished}</think>It rains.")
    guide = guide_of("seed", prompt="assistant: <seed:think>", thinks=True, think="<seed:think>")
    assert allows(guide, f"{thought}</think> <function=now>.</seed:think>{CALLS['seed']}")
    assert not allows(guide, f"{thought}</seed:think><seed:tool_call>\n<function=now>It")
    assert allows(guide_of("hermes", thinks=True), call)
    assert not allows(guide_of("hermes", thinks=True), thought)
    assert not allows(guide_of("hermes", thinks=True, prompt="Explain <think> to me."), thought)
    assert not allows(guide_of("hermes"), f"<think>{thought}</think>")


@pytest.mark.parametrize("name", FORMS)
def test_a_name_may_begin_as_another_one(name: str) -> None:
    free = {"type": "function", "name": "weath"}
    guide, call = guide_of(name, [free, STRICT]), CALLS[name]
    assert allows(guide, call)
    assert allows(guide, call.replace("weather", "weath").replace("days", "many days"))
    assert not allows(guide, call.replace("days", "many days"))


@pytest.mark.parametrize("name", FORMS)
def test_a_schema_is_not_longer_than_it_has_to_be(name: str) -> None:
    described = {"type": "string", "description": "größe", "title": "T"}
    const = {"const": {"title": "x", "description": "y"}}
    properties = {"title": described, "description": {**const, "$comment": "c"}}
    schema = {"type": "object", "properties": properties, "required": ["title"], "title": "S"}
    guide = guide_of(name, [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}])
    assert guide is not None
    (kept,) = re.findall(r'"json_schema": (\{.*?\}), "style"', guide)
    shorter = {"title": {"type": "string"}, "description": const}
    assert json.loads(kept) == {"type": "object", "properties": shorter, "required": ["title"]}
    assert "ü" in (guide_of(name, [{"type": "function", "function": {"name": "für", "strict": True}}]) or "")


@pytest.mark.parametrize(
    ("name", "tools", "special"),
    [
        ("hermes", [FREE], ()),
        ("hermes", [{**STRICT, "function": {**STRICT["function"], "strict": "yes"}}], ()),
        ("hermes", [], ()),
        ("hermes", ["x", {}, {"function": 1}, {"function": {"name": 1, "strict": True}}], ()),
        *((name, TOOLS, ()) for name in WRITTEN if name not in FORMS),
        ("hermes", TOOLS, ("<tool_call>",)),
        ("coder", TOOLS, ("</parameter>",)),
        ("glm", TOOLS, ("<arg_key>",)),
        ("deepseek v3", TOOLS, ("<｜tool▁sep｜>",)),
        ("kimi", TOOLS, ("<|tool_call_argument_begin|>",)),
        ("minimax", TOOLS, ("</invoke>",)),
        ("in bars", TOOLS, ("<|/tool_call|>",)),
        ("nemotron", TOOLS, ("</TOOLCALL>",)),
        ("seed", TOOLS, ("</function>",)),
    ],
)
def test_without_a_strict_function_or_a_form_that_can_be_guided_there_is_no_guide(
    name: str, tools: Any, special: tuple[str, ...]
) -> None:
    assert guide_of(name, tools, special=special) is None


def test_special_tokens_that_no_call_has_change_nothing() -> None:
    for token in ("<|im_end|>", "\n", "<", "</think>"):
        assert guide_of("hermes", special=(token,)) == guide_of("hermes")
    assert guide_of("hermes", special=("</think>",), thinks=True) is None
