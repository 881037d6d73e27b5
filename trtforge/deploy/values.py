"""Objects that contain settings: written as YAML with the settings' values, or as a Helm template.

Both come from one tree of objects: plain manifests equal the chart rendered with its values.yaml.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Node = Any
"""A JSON value in which any part may be a Value, Text, Sum or When."""

_ESCAPED = '{{ "{{" }}'
_OTHER_TYPES = re.compile(
    r"[yn]|[-+]?(?:0[box][0-9a-f]+|(?:\.[0-9]+|[0-9]+\.?[0-9]*)(?:e[-+]?[0-9]+)?)", re.ASCII | re.IGNORECASE
)
"""Strings, without their underscores, that the YAML of kubectl, Helm and Compose reads as a boolean or number, and
PyYAML partly does not, such as 08 and 1e3 (https://github.com/go-yaml/yaml, v2 and v3, resolve.go)."""


@dataclass(frozen=True)
class Value:
    """A setting of the chart. `path`: its dotted key in values.yaml; `schema`: additions to its JSON schema.

    `builtin`: instead of a key, a value that Helm provides, such as the release's name.
    """

    path: str
    value: Any
    about: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    builtin: bool = False

    @property
    def expression(self) -> str:
        """The value in Go's template language; whole numbers of values.yaml are float64 there."""
        name = f".{self.path}" if self.builtin else f".Values.{self.path}"
        return f"(int64 {name})" if isinstance(self.value, int) and not isinstance(self.value, bool) else name


@dataclass(frozen=True)
class Text:
    """A string composed of strings and settings."""

    parts: tuple["str | Value", ...]


@dataclass(frozen=True)
class When:
    """A node that is present only if a setting is true or not empty; with `otherwise`, only if it is false or empty."""

    setting: Value
    node: Node
    otherwise: bool = False

    @property
    def holds(self) -> bool:
        """Whether the node is present with the setting's own value."""
        return bool(self.setting.value) is not self.otherwise


def text(*parts: "str | Value | Text") -> Text:
    """A Text of these parts."""
    return Text(tuple(inner for part in parts for inner in (part.parts if isinstance(part, Text) else (part,))))


def plain(node: Node) -> Any:
    """`node` with every setting's value: JSON's types only."""
    if isinstance(node, Value):
        return node.value
    if isinstance(node, Text):
        return "".join(str(part.value) if isinstance(part, Value) else part for part in node.parts)
    if isinstance(node, When):
        return plain(node.node)
    if isinstance(node, Mapping):
        return {key: plain(inner) for key, inner in node.items() if _is_there(inner)}
    if isinstance(node, list | tuple):
        return [plain(inner) for inner in node if _is_there(inner)]
    return node


def settings(node: Node) -> Iterator[Value]:
    """Every setting in `node`, in order, with repetitions."""
    if isinstance(node, Value):
        yield node
    elif isinstance(node, Text):
        yield from (part for part in node.parts if isinstance(part, Value))
    elif isinstance(node, When):
        yield node.setting
        yield from settings(node.node)
    elif isinstance(node, Mapping):
        for inner in node.values():
            yield from settings(inner)
    elif isinstance(node, list | tuple):
        for inner in node:
            yield from settings(inner)


def as_yaml(node: Node) -> str:
    """The YAML text of `node` with every setting's value."""
    return "\n".join(_lines(plain(node), _scalar)) + "\n"


def as_template(node: Node) -> str:
    """The Helm template of `node`."""
    lines = list(_lines(node.node if isinstance(node, When) else node, _template_scalar))
    return "\n".join(_guarded(node, lines)) + "\n"


def _is_there(node: Node) -> bool:
    return not isinstance(node, When) or node.holds


def _guarded(node: Node, lines: list[str]) -> list[str]:
    """The lines of a node, in a condition if it has one."""
    if not isinstance(node, When):
        return lines
    condition = f"not {node.setting.expression}" if node.otherwise else node.setting.expression
    return [f"{{{{- if {condition} }}}}", *lines, "{{- end }}"]


Scalar = Callable[[Node], str]


def _lines(node: Node, scalar: Scalar) -> Iterator[str]:
    """The lines of a mapping or list in block style."""
    entries = node.items() if isinstance(node, Mapping) else [(None, entry) for entry in node]
    for key, entry in entries:
        inner = entry.node if isinstance(entry, When) else entry
        yield from _guarded(entry, list(_entry(key, inner, scalar)))


def _entry(key: str | None, node: Node, scalar: Scalar) -> Iterator[str]:
    """The lines of one entry: of a mapping with its key, of a list without."""
    start = "-" if key is None else f"{_scalar(key)}:"
    if isinstance(node, Mapping | list | tuple) and node:
        below = _lines(node, scalar)
        if key is None:
            first = True
            for line in below:
                yield f"- {line}" if first else f"  {line}"
                first = False
            return
        yield start
        yield from (f"  {line}" if not line.startswith("{{-") else line for line in below)
        return
    block = _block(node)
    if block is not None:
        yield f"{start} |{'' if block.endswith(chr(10)) else '-'}"
        yield from (f"  {scalar(_Raw(line))}" if line else "" for line in block.removesuffix("\n").split("\n"))
        return
    yield f"{start} {scalar(node)}"


@dataclass(frozen=True)
class _Raw:
    """A line of a block of text, which needs no quotes."""

    line: str


def _block(node: Node) -> str | None:
    """The text of a node that is written as a block of lines; None for other nodes and for text that needs quotes."""
    if not isinstance(node, str) or "\n" not in node:
        return None
    lines = node.removesuffix("\n").split("\n")
    readable = all(line.isprintable() and line == line.rstrip() for line in lines)
    return node if readable and lines[-1] and lines[0] == lines[0].lstrip() != "" else None


def _scalar(node: Node) -> str:
    """A scalar, or an empty collection, as YAML on one line."""
    if isinstance(node, _Raw):
        return node.line
    if isinstance(node, Mapping | list | tuple):
        return json.dumps(node)
    style = None
    if isinstance(node, str):
        style = '"' if not node.isprintable() else "'" if _OTHER_TYPES.fullmatch(node.replace("_", "")) else None
    written = yaml.safe_dump(node, default_style=style, width=math.inf, allow_unicode=style != '"')
    return written.removesuffix("...\n").removesuffix("\n")


def _template_scalar(node: Node) -> str:
    if isinstance(node, Value):
        return f"{{{{ {node.expression} | toJson }}}}"
    if isinstance(node, Text):
        form = "".join("%v" if isinstance(part, Value) else part.replace("%", "%%") for part in node.parts)
        given = " ".join(part.expression for part in node.parts if isinstance(part, Value))
        return f"{{{{ printf {json.dumps(form)} {given} | toJson }}}}"
    return _scalar(node).replace("{{", _ESCAPED)
