"""Renders chat messages with a tokenizer's own Jinja template.

Variables, filters and functions are those of transformers (utils/chat_template_utils.py, release 5), whose result is
the same; that package is not needed here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trtforge.core.template_messages import TemplateMessages
from trtforge.core.template_tools import Message, Tools


class PromptTemplate:
    """One template, and what it expects of messages. `source`: its Jinja text. Raises what compiling it raises."""

    def __init__(self, source: str) -> None:
        self._template = chat_environment().from_string(source)
        self._messages = TemplateMessages(source)

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """The prompt. Raises what Jinja and the template's expressions raise, which may be any Exception.

        `values`: the template's other variables, among them the `tools`.
        """

        def render(shown: list[Message], tools: Tools | None) -> str:
            return self._template.render(**{**values, "messages": shown, "tools": tools})

        return self._messages.prompt(render, messages, values.get("tools"))


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; it changes nothing in the prompt."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: sandboxed, because they come with the model."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format_: datetime.now().strftime(format_)
    environment.globals["dict"] = lambda *values, **named: dict(*values, **named)  # not the class with its attributes
    environment.globals["namespace"] = _Namespace
    return environment


class _Namespace(Namespace):
    """Jinja's namespace, whose attributes must not begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> None:
    raise TemplateError(str(message))
