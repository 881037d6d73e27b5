"""Prompts of chat messages: the same as those of transformers, and clear errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.chat_templates import FAMILIES, QUESTION, SYSTEM, TALK, Family, refusal, served, write_tokenizer
from tests.conftest import DEMO_MODEL
from trtforge.core.errors import ForgeError
from trtforge.formats.chat_template import ChatTemplate, read_chat_template
from trtforge.package import template_check
from trtforge.package.template_check import Tried, try_template
from trtforge.package.tokenizer import read_tokenizer

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = write_tokenizer(family, tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    assert try_template(chat).problem is None
    template = served(chat, tmp_path)
    for messages in (QUESTION, TALK, *([*SYSTEM, *talk] for talk in (QUESTION, TALK) if family.system)):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.chat(json.dumps(messages)).prompt == expected
        without = tokenizer.apply_chat_template(messages, tokenize=False)
        assert template.chat(json.dumps({"messages": messages, "add_generation_prompt": False})).prompt == without


@pytest.mark.parametrize("name", FAMILIES)
def test_null_fields_are_left_out_as_in_transformers(name: str, tmp_path: Path) -> None:
    """As clients send back what OpenAI's API answered."""
    tokenizer = write_tokenizer(FAMILIES[name], tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    messages = [{**message, "name": None, "tool_calls": None, "reasoning_content": None} for message in TALK]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert served(chat, tmp_path).chat(json.dumps(messages)).prompt == expected
    assert "None" not in expected


def test_a_content_of_null_is_not_shown(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role + ':' }}{{ m.content }};{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert served(ChatTemplate(source), tmp_path).chat(json.dumps(messages)).prompt == "user:a;assistant:;"


@pytest.mark.parametrize("test", ["is not none", "!= None", "is none or true"])
def test_a_content_of_null_reaches_templates_that_compare_it(test: str, tmp_path: Path) -> None:
    """Such as Functionary's; `transformers` leaves it out, so that they would append something undefined."""
    source = (
        "{% for m in messages %}{{ m.role }}{% if m.content " + test + " %}={{ m['content'] }}{% endif %};{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "name": None}]
    shown = served(ChatTemplate(source), tmp_path).chat(json.dumps(messages)).prompt
    assert shown == ("user=a;assistant=None;" if "or" in test else "user=a;assistant;")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", ["The answer", " The answer is \n"])
def test_an_answer_is_continued_as_in_transformers(name: str, text: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(FAMILIES[name], tmp_path)
    messages = [*QUESTION, {"role": "assistant", "content": text}]
    chat = read_chat_template(tmp_path)
    assert chat is not None
    expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    request = {"messages": messages, "continue_final_message": True}
    assert served(chat, tmp_path).chat(json.dumps(request)).prompt == expected


def test_parts_of_a_message_are_continued_as_in_transformers(tmp_path: Path) -> None:
    parts = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}"
    tokenizer = write_tokenizer(Family(parts, (), "llama"), tmp_path)
    messages = [{"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]}]
    chat = read_chat_template(tmp_path)
    assert chat is not None
    expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    request = {"messages": messages, "continue_final_message": True}
    assert served(chat, tmp_path).chat(json.dumps(request)).prompt == expected == "user:One two"


def test_tools_and_further_fields_reach_the_template(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "ö": "<>"}}}
    qwen2 = write_tokenizer(FAMILIES["qwen2"], tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    request = {"messages": TALK, "tools": [tool], "add_generation_prompt": True}
    expected = qwen2.apply_chat_template(TALK, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert served(chat, tmp_path).chat(json.dumps(request)).prompt == expected
    qwen3 = write_tokenizer(FAMILIES["qwen3"], tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    talk = [*QUESTION, {"role": "assistant", "content": "Yes.", "reasoning": "\nBecause.\n"}]
    for values in ({}, {"enable_thinking": False}):
        expected = qwen3.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **values)
        assert (
            served(chat, tmp_path).chat(json.dumps({"messages": talk, "chat_template_kwargs": values})).prompt
            == expected
        )
        assert "Because." in expected


def test_documents_reach_the_template_as_in_transformers(tmp_path: Path) -> None:
    source = "{% for d in documents or [] %}{{ d.title }}={{ d.text }};{% endfor %}{{ messages[0].content }}"
    tokenizer = write_tokenizer(Family(source, (), "llama"), tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    template = served(chat, tmp_path)
    first, second = [{"title": "ä", "text": "one"}], [{"title": "b", "text": "<two>"}]
    asked = {"messages": QUESTION, "chat_template_kwargs": {"documents": first}}
    of_first = tokenizer.apply_chat_template(QUESTION, documents=first, tokenize=False)
    of_second = tokenizer.apply_chat_template(QUESTION, documents=second, tokenize=False)
    assert of_first.startswith("ä=one;")
    assert template.chat(json.dumps(asked)).prompt == of_first
    assert template.chat(json.dumps({**asked, "documents": None})).prompt == of_first
    assert template.chat(json.dumps({**asked, "documents": second})).prompt == of_second
    assert template.chat(json.dumps({"messages": QUESTION, "documents": second})).prompt == of_second
    without = tokenizer.apply_chat_template(QUESTION, tokenize=False)
    assert template.chat(json.dumps({**asked, "documents": []})).prompt == without
    assert template.chat(json.dumps(QUESTION)).prompt == without


NO_EFFORT = {"reasoning_effort": "none", "enable_thinking": False}


def test_templates_that_refuse_the_effort_none_get_no_effort_if_thinking_is_off(tmp_path: Path) -> None:
    """As those of Hy3 and Qwen 3.8."""
    source = (
        "{% set effort = reasoning_effort|default('no_think') %}"
        "{% if effort not in ('no_think', 'high') %}{{ raise_exception('effort ' ~ effort) }}{% endif %}{{ effort }}"
    )
    tokenizer = write_tokenizer(Family(source, (), "llama"), tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    template = served(chat, tmp_path)

    def asked(**variables: object) -> dict[str, object]:
        return {"messages": QUESTION, "chat_template_kwargs": variables}

    expected = tokenizer.apply_chat_template(QUESTION, tokenize=False, enable_thinking=False)
    assert template.chat(json.dumps(asked(**NO_EFFORT))).prompt == expected == "no_think"
    assert template.chat(json.dumps(asked(reasoning_effort="high", enable_thinking=False))).prompt == "high"
    for refused in ({**NO_EFFORT, "enable_thinking": True}, {"reasoning_effort": "none"}):
        assert refusal(template, asked(**refused)).endswith("refuses them: effort none")
    assert refusal(template, asked(reasoning_effort="low", enable_thinking=False)).endswith("effort low")
    shown = served(ChatTemplate("{{ reasoning_effort }},{{ enable_thinking }}"), tmp_path)
    assert shown.chat(json.dumps(asked(**NO_EFFORT))).prompt == "none,False"
    refusing = served(ChatTemplate("{{ raise_exception(reasoning_effort|default('always')) }}"), tmp_path)
    assert refusal(refusing, asked(**NO_EFFORT)).endswith("refuses them: always")


def test_the_template_for_tools_is_used_with_tools_only(tmp_path: Path) -> None:
    template = served(ChatTemplate("plain", "{{ tools[0].name }}"), tmp_path)
    assert template.chat(json.dumps({"messages": QUESTION, "tools": []})).prompt == "plain"
    assert template.chat(json.dumps({"messages": QUESTION, "tools": [{"name": "look"}]})).prompt == "look"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("[{", "messages is not JSON"),
        ("[" * 100_000, "messages is not JSON"),
        ("3", "messages is neither an array of messages nor an object that has one"),
        ([], "messages: there must be at least one message"),
        ({"messages": "hello"}, "messages: there must be at least one message"),
        ([{"content": "x"}], "messages: message 0 has no role"),
        ([*QUESTION, "x"], "messages: message 1 has no role"),
        ({"messages": QUESTION, "tolls": []}, "messages: the field 'tolls' is not one of"),
        ({"messages": QUESTION, "tools": {}}, "messages: tools is not an array"),
        ({"messages": QUESTION, "chat_template_kwargs": []}, "messages: chat_template_kwargs is not an object"),
        ([{"role": "user", "content": "x"}] * 5000, "messages: there are 5000 messages; at most 4096 are allowed"),
        ([{"role": "user", "content": "\ud800"}], "messages: a string has half a surrogate pair"),
        (SYSTEM, "messages: the chat template refuses them: System role not supported"),
        (QUESTION * 2, "messages: the chat template refuses them: Conversation roles must alternate"),
        ({"messages": [{"role": "user", "content": None}], "continue_final_message": True}, "has no text"),
    ],
)
def test_a_wrong_request_is_refused(request_: object, message: str, tmp_path: Path) -> None:
    write_tokenizer(FAMILIES["gemma"], tmp_path)
    chat = read_chat_template(tmp_path)
    assert chat is not None
    assert message in refusal(served(chat, tmp_path), request_)


def test_content_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    template = served(ChatTemplate(FAMILIES["qwen2"].template), tmp_path)
    error = refusal(template, [{"role": "user", "content": 3}])
    assert error.startswith("messages: the chat template cannot render them: TypeError: ")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str, tmp_path: Path) -> None:
    assert "messages: the chat template refuses them" in refusal(served(ChatTemplate(template), tmp_path), QUESTION)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.fixed_dictionaries({"role": st.text(max_size=5)}, optional={"content": JSON}), max_size=3) | JSON)
def test_any_json_is_rendered_or_refused(request_: object) -> None:
    from chat_template import ChatTemplate as Served
    from responder import RequestFailed

    template = Served(ChatTemplate(FAMILIES["llama3"].template, special_tokens={"bos_token": "<s>"}).as_json())
    try:
        answer = template.chat(json.dumps(request_)).prompt
    except RequestFailed as failure:
        answer = str(failure)
    assert answer.startswith(("messages", "<s>"))


def test_named_templates_and_token_objects_are_read(tmp_path: Path) -> None:
    config = {
        "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": None,
        "additional_special_tokens": ["<x>", {"content": "<y>"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    special = {"bos_token": "<s>", "additional_special_tokens": ["<x>", "<y>"]}
    assert read_chat_template(tmp_path) == ChatTemplate("a", "b", special)
    (tmp_path / "chat_template.jinja").write_text("c")
    assert read_chat_template(tmp_path) == ChatTemplate("c", "b", special)


def test_templates_that_transformers_saves_apart_are_read(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    tokenizer.chat_template = {"default": "a", "tool_use": "b", "rag": "c"}
    tokenizer.save_pretrained(tmp_path)
    found = read_chat_template(tmp_path)
    assert found is not None
    assert (found.template, found.tool_template) == ("a", "b")


def test_no_template_is_none_and_a_damaged_one_an_error(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [3]}')
    with pytest.raises(ForgeError, match="chat_template is neither a text nor a list of named texts"):
        read_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ForgeError, match=r"chat_template\.jinja: not UTF-8"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ a }}\n{% if %}", "line 2: Expected an expression, got 'end of statement block'"),
        ("{{ a }}\n{{ a | nofilter }}", "line 2: No filter named 'nofilter'."),
        ("{% block a %}{% endblock %}{% block a %}{% endblock %}", "line 1: block 'a' defined twice"),
        ("{% break %}", "'break' outside loop"),
        ("{% for a in b %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{{ " + "(" * 900 + "1" + ")" * 900 + " }}", "it is nested too deeply"),
        ("{{ " + "9" * 5000 + " }}", "ValueError: Exceeds the limit (4300"),
        ("{{ 'a' * 2000000000 }}", "it takes more than 1 GiB of memory for a short conversation"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "it takes more than 10 s of CPU time for a short conversation",
        ),
        ("{%+ generation %}{{ raise_exception('no') }}{%+ endgeneration %}", None),
        ("{{ cycler() }}", None),
    ],
    ids=range(11),
)
def test_a_template_that_cannot_be_used_is_told_with_the_reason(source: str, problem: str | None) -> None:
    for chat in (ChatTemplate(source), ChatTemplate("a", source)):
        found = try_template(chat).problem
        assert found == problem or (found or "").startswith(f"{problem}"), found


SHOWN = "{{ tools | tojson if tools }}"
CALLED = "{% for m in messages %}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
NO_TOOLS, UNKNOWN_CALLS = "shows the model no tools: ", "shows tools, but calls in a format that is not known: "


def calling(call: str, prompt: str = "") -> str:
    """A template that shows tools, and calls in this form. `prompt`: how the model is asked to answer."""
    name, arguments = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
    call = call.replace("NAME", name).replace("ARGUMENTS", arguments)
    return SHOWN + CALLED.replace("CALL", call) + f"{{{{ {json.dumps(prompt)} if add_generation_prompt }}}}"


@pytest.mark.parametrize(
    ("source", "lack"),
    [
        ("{{ messages[0].content }}", NO_TOOLS),
        ("", NO_TOOLS),
        ("{% for tool in xml_tools or [] %}{{ tool }}{% endfor %}", NO_TOOLS),
        (CALLED.replace("CALL", "<tool_call>{{ c.function | tojson }}</tool_call>"), NO_TOOLS),
        ("{% for message in messages %}{{ message['tools'] }}{% endfor %}", None),
        (SHOWN, None),  # whose calls are not known, because it shows none
        ("{{ tools[0].function.name }}", None),  # refuses conversations without tools
        ("{{ raise_exception('no') if tools }}", None),
        (calling("<tool_call>{{ c.function | tojson }}</tool_call>"), None),
        (calling('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'), None),
        (calling("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"), None),
        (
            calling("<|channel|>commentary to=functions.{{ c.function.name }}<|message|>{{ c.function.arguments }}"),
            None,
        ),
        (calling('{"arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}<|end|>'), None),
        (calling('<tool_call>{"id": 1, "arguments": ARGUMENTS, "name": "NAME"}</tool_call>'), None),
        (calling('[{"id": 1, "name": "NAME", "arguments": ARGUMENTS}]</s>'), None),
        (calling("[TOOL_CALLS][{{ c | tojson }}]</s>"), None),
        (calling("<think>\n\n</think>\n\n{{ c.function | tojson }}", prompt="<think>\n"), None),
        (calling("{{ c.function | tojson }}", prompt="\n\n"), None),
        (
            calling(
                "<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS<|call|>",
                prompt="<|start|>assistant",
            ),
            None,
        ),
        (calling(" to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS<|call|>"), None),
        (calling('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ARGUMENTS}<|action_end|>'), UNKNOWN_CALLS),
        (calling('{"name": "NAME", "parameters": ARGUMENTS}', prompt="Write:"), UNKNOWN_CALLS),
        (calling("<|channel|>call:NAME ARGUMENTS"), UNKNOWN_CALLS),
        ("{{ '<|channel|>' }}" + calling("call:NAME ARGUMENTS"), UNKNOWN_CALLS),
        (calling("[{{ c.function.name }}({{ c.function.arguments | xmlattr }})]"), None),
        (calling("[{{ c.function.name }} {{ c.function.arguments | xmlattr }}]"), UNKNOWN_CALLS),
        (
            calling('Action: [{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments }}}]'),
            UNKNOWN_CALLS,
        ),
        (calling(">>>{{ c.function.name }}\n{{ c.function.arguments | tojson }}", prompt=">>>"), None),
        (
            calling(
                "<|tool_call_start|>[NAME({% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})]"
            ),
            None,
        ),
        (
            calling(
                "<|tool_call>call:NAME{ {%- for k, v in c.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}}"
            ),
            None,
        ),
        (
            calling('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}\n]'),
            None,
        ),
        (
            calling(
                'Action: ```json\n[\n    {\n        "tool_name": "NAME",\n        "parameters": ARGUMENTS\n    }\n]```'
            ),
            None,
        ),
        (calling('<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|open|>ARGUMENTS'), None),
        (calling('<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="k" string="true">ARGUMENTS'), None),
    ],
    ids=range(34),
)
def test_what_a_template_does_not_show_is_told(source: str, lack: str | None) -> None:
    for chat in (ChatTemplate(source), ChatTemplate("a", source)):
        tried = try_template(chat)
        assert tried.problem is None
        assert tried.lacks is None if lack is None else (tried.lacks or "").startswith(lack), tried


def test_a_repository_whose_template_shows_no_tools_is_packaged_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert read_tokenizer(tmp_path, 2048).chat == ChatTemplate("{{ messages[0].content }}")
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}: the chat template {NO_TOOLS}")
    caplog.clear()
    assert read_tokenizer(DEMO_MODEL, 2048).chat is not None
    assert caplog.messages == []


@pytest.mark.parametrize("source", ["{{ cycler() }}", "{{ 'a' * 10 ** 15 }}", "{{ '{3}'.format(1) }}", "{{ 1 // 0 }}"])
def test_any_error_of_a_template_is_the_requests(tmp_path: Path, source: str) -> None:
    assert refusal(served(ChatTemplate(f"{{% if messages %}}{source}{{% endif %}}"), tmp_path), QUESTION).startswith(
        "messages: the chat template cannot render them: "
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"python_interpreter": lambda: "/nowhere/python"}, "[Errno 2] No such file or directory: '/nowhere/python'"),
        ({"_PROGRAM": "trtforge.no_such_module"}, "No module named trtforge.no_such_module"),
        ({"module_arguments": lambda _: ("-c", "")}, "trtforge.package.template_main: "),
        (
            {"module_arguments": lambda _: ("-c", "print('{\"problem\": null}')")},
            "trtforge.package.template_main: its output is not what it writes",
        ),
    ],
    ids=["not started", "failed", "no output", "other output"],
)
def test_a_template_that_cannot_be_tried_is_packaged_with_a_warning(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(template_check, name, value)
    assert try_template(ChatTemplate("a")) == Tried()
    (message,) = caplog.messages
    assert message.startswith("the chat template is packaged untried: ")
    assert reason in message


def test_problems_are_told_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    assert try_template(ChatTemplate("{% \u00e9 %}")).problem == "line 1: Encountered unknown tag '\u00e9'."


@pytest.mark.parametrize(("end", "told"), [("<think>\n", b"<think>"), ("[THINK]", b"[THINK]"), ("</think>", b"")])
def test_the_tag_with_which_a_prompt_of_messages_ends(end: str, told: bytes, tmp_path: Path) -> None:
    from model_config import ModelConfig  # type: ignore[import-not-found]
    from preprocessor import PROMPT_THOUGHT, Preprocessor  # type: ignore[import-not-found]

    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    chat = ChatTemplate(f"{{{{ messages[0].content }}}}{{{{ {end!r} if add_generation_prompt }}}}")
    (tmp_path / "chat.json").write_text(json.dumps(chat.as_json()))
    values = {"tokenizer_dir": str(tmp_path), "chat_template": "true", "vocab_size": "2048"}
    parameters = {name: {"string_value": value} for name, value in values.items()}
    repository = {"model_repository": "", "model_version": "1", "model_name": "ensemble"}
    preprocessor = Preprocessor(ModelConfig({"model_config": json.dumps({"parameters": parameters}), **repository}))

    def prepared(name: str, text: str) -> dict[str, Any]:
        text_ = np.array([[text.encode()]], dtype=object)
        outputs: dict[str, Any] = preprocessor.prepare({name: text_, "REQUEST_OUTPUT_LEN": np.array([[4]])})
        return outputs

    assert prepared("messages", json.dumps(QUESTION))[PROMPT_THOUGHT].tolist() == [[told]]
    assert PROMPT_THOUGHT not in prepared("QUERY", "<think>")
