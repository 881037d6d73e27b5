"""Keeps the calls of functions with `strict` to their schemas, in the form that the chat template teaches the model.

The guide is a structural tag of xgrammar (xgrammar/structural_tag.py, 0.2): the answer is free, but what begins a call
is followed by a call of one of the functions, whose arguments follow its schema. Answers to other templates than these
have no guide: their calls begin with special tokens, which no guide allows, or as other text may.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_NAME = "NAME"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_DEEPSEEK_CALL, _DEEPSEEK_NAME, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HERMES = re.compile(_CALL + r'(?P<line>\\n|\n)?\{\\?"name\\?"')
_PARAMETER_MARKS = ("</parameter>", "<parameter=", "</function>")
_LENGTH = re.compile('"(?:min|max)Length"')
"""Bounds that xgrammar would leave out of a schema of texts without the marks."""
_OPEN, _CLOSE = "<think>", "</think>"
_MOST_SPACES = 16
"""Characters of white space in a row within arguments: a model could go on with it for ever."""
_ANY_ARGUMENTS = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class _Form:
    """How a call is written: `begin`, with the function's name, the arguments in one of xgrammar's styles, and `end`.

    `trigger`: the part of `begin` after which nothing but a call may follow; `marks`: the texts that end a value, which
    therefore no text in the arguments may hold.
    """

    trigger: str
    begin: str
    end: str
    style: str = "json"
    marks: tuple[str, ...] = ()

    def tag(self, name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tag of one function's calls."""
        content: dict[str, object] = {
            "type": "json_schema",
            "json_schema": schema,
            "style": self.style,
            "max_whitespace_cnt": _MOST_SPACES,
        }
        if self.marks and not _LENGTH.search(json.dumps(schema)):
            content["excludes"] = self.marks
        return {
            "type": "tag",
            "begin": self.begin.replace(_NAME, json.dumps(name, ensure_ascii=False)[1:-1]),
            "content": content,
            "end": self.end,
        }


_QWEN3_CODER = (
    _Form(_CALL, f"{_CALL}\n<function={_NAME}>", f"</function>\n{_CALL_END}", "qwen_xml", _PARAMETER_MARKS),
    _Form("<function=", f"<function={_NAME}>", "</function>", "qwen_xml", _PARAMETER_MARKS),
)
_GLM = (_Form(_CALL, f"{_CALL}{_NAME}", _CALL_END, "glm_xml", ("</arg_value>",)),)
_DEEPSEEK_V3 = (
    _Form(_DEEPSEEK_CALL, f"{_DEEPSEEK_CALL}function{_DEEPSEEK_NAME}{_NAME}\n```json\n", f"\n```{_DEEPSEEK_END}"),
)
_DEEPSEEK_V31 = (_Form(_DEEPSEEK_CALL, f"{_DEEPSEEK_CALL}{_NAME}{_DEEPSEEK_NAME}", _DEEPSEEK_END),)


class StrictCalls:
    """The guides of one model's answers. `template`: the Jinja text for requests with tools."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        forms = _forms_in(template)
        written = "".join((_OPEN, _CLOSE, *(form.begin + form.end for form in forms)))
        self._forms = () if any(token in written for token in special) else forms
        self._thinks = _OPEN in template

    def guide(self, tools: Sequence[Any], prompt: str) -> str | None:
        """The structural tag (JSON) of an answer; None without a strict function, or without a known form.

        `tools`: as the chat template gets them; `prompt`: what it made of the request.
        """
        functions = dict(_functions(tools))
        if not self._forms or not any(function.get("strict") is True for function in functions.values()):
            return None
        tags = [form.tag(name, _schema(function)) for form in self._forms for name, function in functions.items()]
        calls = {"type": "triggered_tags", "triggers": [form.trigger for form in self._forms], "tags": tags}
        thought = {"type": "tag", "begin": _OPEN, "content": {"type": "any_text"}, "end": _CLOSE}
        parts: list[Mapping[str, Any]] = [calls]
        if prompt.rstrip().endswith(_OPEN):
            parts = [{**thought, "begin": ""}, calls]
        elif self._thinks:
            parts = [{"type": "optional", "content": thought}, calls]
        return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": parts}})


def _forms_in(template: str) -> tuple[_Form, ...]:
    """The forms of calls in a template; none if it has none of these."""
    if "<function=" in template and "<parameter=" in template:
        return _QWEN3_CODER
    if _CALL in template and "<arg_key>" in template:
        return _GLM
    if _DEEPSEEK_CALL in template:
        return _DEEPSEEK_V3 if "```json" in template else _DEEPSEEK_V31
    if hermes := _HERMES.search(template):  # and Qwen 2.5 and 3
        line = "\n" if hermes["line"] else ""
        begin = f'{_CALL}{line}{{"name": "{_NAME}", "arguments": '
        return (_Form(_CALL, begin, f"}}{line}{_CALL_END}"),)
    return ()


def _functions(tools: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and description of each function; anything else in `tools` is for the template alone."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"], function


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments: any object unless it is strict."""
    if function.get("strict") is not True:
        return _ANY_ARGUMENTS
    parameters = function.get("parameters")
    return {"type": "object", **parameters} if isinstance(parameters, dict) and parameters else _NO_ARGUMENTS
