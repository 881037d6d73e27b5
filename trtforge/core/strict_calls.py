"""Constrains calls of `strict` functions to their schemas, in the format of the model's chat template.

The guide is a structural tag of xgrammar (xgrammar/structural_tag.py, 0.2): the answer is free, but after the beginning
of a call, a call of one of the functions with arguments by its schema must follow. Or the answer is JSON of the
requested schema, or only calls. The format is read from a call that the template renders; with an unknown format,
answers have no guide.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from trtforge.core.call_tags import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DSML_INVOKE,
    DSML_INVOKE_END,
    DSML_PARAMETER,
    DSML_PARAMETER_END,
    FUNCTION,
    FUNCTION_END,
    INVOKE,
    INVOKE_END,
    JSON_TAGS,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALL_END,
    TOOL_CALL,
    TOOL_CALL_END,
)
from trtforge.core.json_schema import VALUES, arguments_schema
from trtforge.core.reasoning import THOUGHTS, prompted_thought, unclosed_thought

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NAME, _KEY, _VALUE = "probed_function", "probed_key", "probed_value"
PROBE: Mapping[str, Any] = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
            ],
        },
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": _NAME,
                "description": "Hi",
                "parameters": {
                    "type": "object",
                    "properties": {_KEY: {"type": "string", "description": "Hi"}},
                    "required": [_KEY],
                },
            },
        }
    ],
    "add_generation_prompt": False,
}
"""A conversation with a call, in the form of a `messages` input."""
PROBE_PROMPT: Mapping[str, Any] = {**PROBE, "messages": PROBE["messages"][:1], "add_generation_prompt": True}
"""The conversation up to where the model begins to write."""
_SHOWN_CODER = re.compile(rf"{FUNCTION}{_NAME}>\s*<parameter={_KEY}>")
_SHOWN_GLM = re.compile(rf"{TOOL_CALL}{_NAME}\s*<arg_key>{_KEY}</arg_key>")
_ARGUMENTS = rf'\{{"{_KEY}": ?"{_VALUE}"\}}'
_OBJECT = rf'\{{(?:"type": ?"function", ?)?"(?:tool_)?name": ?"{_NAME}", ?"(?:arguments|parameters)": ?'
_NUMBERED = rf'\{{"tool_call_id": ?"(?P<number>\d{{1,4}})", ?"tool_name": ?"{_NAME}", ?"parameters": ?'
_SHOWN_JSON = {
    tag: re.compile(rf"(?P<begin>{re.escape(tag)}\s{{0,9}}{_OBJECT}){_ARGUMENTS}(?P<end>\}}\s{{0,9}}{re.escape(end)})")
    for tag, end in JSON_TAGS.items()
}
_SHOWN_ARRAYS = {
    tag: re.compile(
        rf"(?P<opens>{re.escape(tag)}\s{{0,9}}\[\s{{0,9}})(?P<begin>{_NUMBERED}|{_OBJECT}){_ARGUMENTS}(?P<end>\}})"
        rf"(?P<closes>\s{{0,9}}\]\s{{0,9}}{re.escape(end)})"
    )
    for tag, end in JSON_TAGS.items()
}
_SHOWN_DEEPSEEK = re.compile(
    rf"(?P<begin>{DEEPSEEK_CALL}(?:function<[^<>]+>{_NAME}|{_NAME}<[^<>]+>)[^{{]{{0,99}}){_ARGUMENTS}"
    rf"(?P<end>[^<]{{0,99}}{DEEPSEEK_CALL_END})"
)
_SHOWN_MINIMAX = re.compile(rf'{INVOKE}{_NAME}">\s*<parameter name="{_KEY}">')
_SHOWN_DSML = re.compile(rf'{DSML_INVOKE}{_NAME}">\s*{DSML_PARAMETER}{_KEY}" string="true">')
_SHOWN_KIMI = re.compile(
    rf"{re.escape(KIMI_CALL)}[^<>]+{re.escape(KIMI_ARGUMENTS)}{_ARGUMENTS}{re.escape(KIMI_CALL_END)}"
)
_MARK = r"<[^<>\s]+>"
_MARKS = re.compile(_MARK)
_TAG = re.compile(rf"\s*{_MARK}\s*")
_TAGS_BEFORE = re.compile(rf"(?:{_MARK}\s{{0,9}})+\Z")
_TAGS_AFTER = re.compile(rf"\A(?:\s{{0,9}}{_MARK})+")
_LENGTH = re.compile('"(?:min|max)Length"')
_BLANKS = 16
"""Characters of white space in a row within arguments: a model could go on with it for ever."""
_BLANK: Mapping[str, Any] = {"type": "regex", "pattern": rf"[ \n\r\t]{{0,{_BLANKS}}}"}
_NUMBER: Mapping[str, Any] = {"type": "regex", "pattern": "[0-9]{1,4}"}
_ANY_TEXT: Mapping[str, Any] = {"type": "any_text"}
_COMMENTS = ("description", "title", "$comment")


@dataclass(frozen=True)
class _Form:
    """How a call is written: `begin`, with the function's name, the arguments in one of xgrammar's styles, and `end`.

    `trigger`: the part of `begin` after which nothing but a call may follow. `argument`: what begins and ends each of
    the arguments between tags; `marks`: what these values must not hold, because it would end them; `numbered`: `begin`
    is followed by a number and this text, which may have the name; `array`: what begins and ends an array of calls.
    """

    trigger: str
    begin: str
    end: str
    style: str = "json"
    argument: tuple[str, str] | None = None
    marks: tuple[str, ...] = ()
    numbered: str = ""
    array: tuple[str, str] | None = None

    def tags(self, functions: Mapping[str, Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The tags of the calls of all functions, by their names."""
        tags = [self._tag(name, _schema(function)) for name, function in functions.items()]
        if self.array is None:
            return tags
        begin, end = self.array
        separator = f",{begin[len(begin.rstrip()) :] or ' '}"
        calls = {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}
        return [{"type": "tag", "begin": begin, "content": calls, "end": end}]

    def _tag(self, name: str, schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The tag of one function's calls; without a schema they take any arguments."""
        quoted = json.dumps(name, ensure_ascii=False)[1:-1] if 'name"' in self.begin + self.numbered else name
        begin = self.begin.replace(_NAME, quoted)
        content = self._arguments(schema)
        if self.numbered:
            content = _sequence(_NUMBER, _const(self.numbered.replace(_NAME, quoted)), content)
        return {"type": "tag", "begin": begin, "content": content, "end": self.end}

    def _arguments(self, schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if schema is None and self.argument is not None:
            begin, end = self.argument
            argument = {"type": "tag", "begin": begin, "content": _ANY_TEXT, "end": end}
            return _sequence(_BLANK, {"type": "star", "content": _sequence(argument, _BLANK)})
        content = _json_of(schema or {"type": "object"}, self.style)
        # Beside these xgrammar would leave out the bounds of lengths.
        if self.marks and not _LENGTH.search(json.dumps(schema)):
            content["excludes"] = self.marks
        return content


_QWEN3_CODER = _Form(
    FUNCTION,
    f"{FUNCTION}{_NAME}>",
    FUNCTION_END,
    "qwen_xml",
    ("<parameter=", "</parameter>"),
    ("</parameter>", "<parameter=", FUNCTION_END),
)
_GLM = _Form(
    TOOL_CALL, f"{TOOL_CALL}{_NAME}", TOOL_CALL_END, "glm_xml", ("<arg_key>", "</arg_value>"), ("</arg_value>",)
)
_MINIMAX = _Form(
    INVOKE,
    f'{INVOKE}{_NAME}">',
    INVOKE_END,
    "minimax_xml",
    ('<parameter name="', "</parameter>"),
    ("</parameter>",),
)
_KIMI = _Form(KIMI_CALL, f"{KIMI_CALL}functions.{_NAME}:", KIMI_CALL_END, numbered=KIMI_ARGUMENTS)
_DSML = _Form(
    DSML_INVOKE,
    f'{DSML_INVOKE}{_NAME}">',
    DSML_INVOKE_END,
    "deepseek_xml",
    (DSML_PARAMETER, DSML_PARAMETER_END),
    (DSML_PARAMETER_END,),
)
_SHOWN = {
    _SHOWN_CODER: _QWEN3_CODER,
    _SHOWN_GLM: _GLM,
    _SHOWN_MINIMAX: _MINIMAX,
    _SHOWN_KIMI: _KIMI,
    _SHOWN_DSML: _DSML,
}


class StrictCalls:
    """The guides of one model's answers.

    `template`: the Jinja text for requests with tools; `shown`: its rendering of `PROBE`, "" if it refuses that;
    `prompt`: that of `PROBE_PROMPT`, which is needed only for guides with `said`.
    """

    def __init__(self, template: str, shown: str, tokenizer: "Tokenizer", prompt: str = "") -> None:
        self._think = next((tags for tags in THOUGHTS if tags[0] in template), None)
        self._form = _form_in(shown)
        self._around: tuple[Sequence[str], Sequence[str]] = ((), ())
        if self._form is not None:
            special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
            self._around = _around(shown, self._form, {*special, *(self._think or ())}, prompt)
            array = self._form.array or ("", "")
            written = {*_MARKS.findall(array[0] + self._form.begin + self._form.numbered + self._form.end + array[1])}
            written |= {*self._form.marks, *(self._think or ()), *(self._form.argument or ())}
            self._form = None if written & special else self._form  # no guide allows these tokens

    def guide(
        self, tools: Sequence[Any], prompt: str, *, continues: bool, said: Mapping[str, Any] | None = None
    ) -> str | None:
        """The structural tag (JSON) of an answer; None if it needs none, or the form of calls is not known.

        `tools`: as the chat template gets them; `prompt`: what it made of the request; `continues`: the answer
        continues the final message; `said`: the schema of an answer without calls. Without it answers need a guide
        where one of the functions is strict.
        """
        functions = dict(functions_of(tools))
        is_strict = any(function.get("strict") is True for function in functions.values())
        if self._form is None or not (is_strict or (functions and said is not None)):
            return None
        tags = self._form.tags(functions)
        if said is not None:
            return _tag_of({"type": "or", "elements": [_json_of(said), self._calls(tags)]})
        answer: Mapping[str, Any] = {"type": "triggered_tags", "triggers": [self._form.trigger], "tags": tags}
        if self._think is not None:
            answer = _after_thought(answer, *self._think, begun=self._begun_thought(prompt, continues=continues))
        return _tag_of(answer)

    def _calls(self, tags: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """One call or several, and nothing else but what the template writes around them."""
        before, after = (map(_optional, tags_) for tags_ in self._around)
        tag = tags[0] if len(tags) == 1 else {"type": "or", "elements": tags}
        call = _sequence(*before, tag, *after)
        return _sequence(_BLANK, call, {"type": "star", "content": _sequence(_BLANK, call)})

    def _begun_thought(self, prompt: str, *, continues: bool) -> bool:
        assert self._think is not None
        begun = unclosed_thought(prompt) if continues else None
        return prompted_thought(prompt) == self._think[0] or (begun is not None and begun[1] == self._think)


def _form_in(shown: str) -> _Form | None:
    """The form of the call that a template shows."""
    for pattern, form in _SHOWN.items():
        if pattern.search(shown):
            return form
    for trigger, pattern in {**_SHOWN_JSON, DEEPSEEK_CALL: _SHOWN_DEEPSEEK}.items():
        if found := pattern.search(shown):
            return _Form(trigger, found["begin"], found["end"])
    for trigger, pattern in _SHOWN_ARRAYS.items():
        if found := pattern.search(shown):
            begin, number, numbered = found["begin"], found["number"], ""
            if number is not None:
                begin, _, numbered = begin.partition(number)
            array = (found["opens"], found["closes"])
            return _Form(trigger, begin, found["end"], numbered=numbered, array=array)
    return None


def _around(shown: str, form: _Form, outside: Collection[str], prompt: str) -> tuple[Sequence[str], Sequence[str]]:
    """The tags that a template writes directly before and after a call, up to the first that is `outside` of answers.

    Those with which the `prompt` ends are not the answer's. The last ones may end the message: none is required.
    """
    begin, end = form.array or (form.begin, form.end)
    start = shown.find(begin)
    stop = shown.find(end, start + len(begin))
    if start < 0 or stop < 0:
        return (), ()
    prompted = {tag.strip() for tag in _tags_in(_TAGS_BEFORE, prompt.rstrip())}
    before = _until({*outside, *prompted}, reversed(_tags_in(_TAGS_BEFORE, shown[:start])))
    return before[::-1], _until(outside, _tags_in(_TAGS_AFTER, shown[stop + len(end) :]))


def _tags_in(found: re.Pattern[str], text: str) -> Sequence[str]:
    """The tags at one end of a text, with the white space beside each."""
    matched = found.search(text)
    return _TAG.findall(matched[0]) if matched else ()


def _until(outside: Collection[str], tags: Iterable[str]) -> Sequence[str]:
    return list(takewhile(lambda tag: tag.strip() not in outside, tags))


def _tag_of(format_: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)


def _json_of(schema: Mapping[str, Any], style: str = "json") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": _BLANKS}


def _optional(text: str) -> Mapping[str, Any]:
    return {"type": "optional", "content": _const(text)}


def _const(text: str) -> Mapping[str, Any]:
    return {"type": "const_string", "value": text}


def _after_thought(answer: Mapping[str, Any], begin: str, end: str, *, begun: bool) -> Mapping[str, Any]:
    """An answer that may follow reasoning, or end within it. `begun`: the prompt has begun the reasoning.

    The calls with which reasoning that is not closed ends count, so only calls of the answer may be in it.
    """
    tag = {"type": "tag", "begin": "" if begun else begin, "content": _ANY_TEXT, "end": end}
    begins = [] if begun else [_const(begin)]
    thought = {"type": "or", "elements": [_sequence(tag, answer), _sequence(*begins, {**answer, "excludes": [end]})]}
    return thought if begun else {"type": "or", "elements": [answer, _sequence(_BLANK, thought)]}


def _sequence(*elements: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "sequence", "elements": elements}


def functions_of(tools: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and description of each function among the tools of a chat."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function["name"], function


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a strict function's arguments."""
    if function.get("strict") is not True:
        return None
    return arguments_schema(_without_comments(function.get("parameters")))


def _without_comments(schema: Any) -> Any:
    """A schema without its texts for readers, which would make the guide longer."""
    if isinstance(schema, list):
        return [_without_comments(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in VALUES else _without_comments(value)
        for key, value in schema.items()
        if not (key in _COMMENTS and isinstance(value, str))
    }
