"""The only YAML reader: JSON's types, all sizes limited, and errors name the file and the line.

Dates are text, and tags of other types are refused. An alias counts as all values that it expands to, because a few
lines of nested aliases could expand to billions of values.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trtforge.core.errors import ForgeError, Where
from trtforge.core.json_text import MOST_DIGITS
from trtforge.core.reading import KIB, as_text, read_limited

MOST_BYTES = 256 * KIB
MOST_VALUES = 50_000
DEEPEST = 32

_TAG = "tag:yaml.org,2002:"
_TIMESTAMP = f"{_TAG}timestamp"
_MERGE = f"{_TAG}merge"
_PLAIN = re.compile(r"[\w./](?:[\w./@+ -]*[\w./])?")
"""Letters of usual paths, which are never syntax."""
_BLOCK = re.compile(r"[|>][-+0-9]*([ \t]+#[^\r\n]*)?")
"""The header of a block scalar, and its comment."""
_KNOWN = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


class _Refused(yaml.MarkedYAMLError):
    """The error for YAML that this reader refuses, with its position."""

    def __init__(self, problem: str, node: Any) -> None:
        super().__init__(problem=problem, problem_mark=getattr(node, "start_mark", None))


class _Loader(yaml.SafeLoader):
    """SafeLoader without dates, foreign tags and repeated keys, and with limits."""

    yaml_implicit_resolvers = {  # noqa: RUF012, a table of SafeLoader's
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self._depth > DEEPEST:
            raise _Refused(f"nested more than {DEEPEST} deep", event)
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _Refused("an alias inside its own anchor", event)
        else:
            if node.tag not in _KNOWN:
                raise _Refused(f"values of type {node.tag.replace(_TAG, '!!')} are not supported", node)
            if isinstance(node, MappingNode):
                _check_keys(node)
            self._sizes[id(node)] = self._size(node)
        self._values += 1
        if self._sizes[id(node)] > MOST_VALUES or self._values > MOST_VALUES:
            raise _Refused(f"more than {MOST_VALUES:,} values after expanding aliases", event)
        return node

    def _size(self, node: Node) -> int:
        if isinstance(node, MappingNode):
            return 1 + sum(self._sizes[id(key)] + self._sizes[id(value)] for key, value in node.value)
        if isinstance(node, SequenceNode):
            return 1 + sum(self._sizes[id(item)] for item in node.value)
        return 1

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, ScalarNode) and node.tag == f"{_TAG}int" and len(node.value) > MOST_DIGITS:
            raise _Refused(f"a number of {len(node.value):,} characters, the limit is {MOST_DIGITS}", node)
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, AttributeError, OverflowError):
            raise _Refused(f"{_shown(node)} is not of type {node.tag.replace(_TAG, '!!')}", node) from None


def read_yaml(path: Path, *, hint: str, absent: str | None = None) -> Any:
    """The value in a YAML file. `hint` is for a damaged file, `absent` for a missing one.

    Raises AbsentFile or ForgeError.
    """
    return parse_yaml(read_yaml_text(path, hint=hint, absent=absent), path, hint)


def read_yaml_text(path: Path, *, hint: str, absent: str | None = None) -> str:
    """The text of a YAML file, not parsed. Raises as `read_yaml`, except for invalid YAML."""
    return as_text(read_limited(path, MOST_BYTES, hint=hint, absent=absent), str(path), hint="Save it as UTF-8.")


def parse_yaml(text: str, where: object, hint: str) -> Any:
    """The value of a YAML text, None for an empty one. Raises ForgeError naming `where` and the line."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}" if mark is not None else ""
        said = ": ".join(part for part in (error.context, error.problem) if part) or str(error)
        at = Where(str(where), mark.line + 1 if mark is not None else None)
        raise ForgeError(f"{where}{place}: not YAML: {said}", hint=hint).at(at) from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # characters outside Unicode
        said = " ".join(str(error).split())
        raise ForgeError(f"{where}: not YAML: {said}", hint=hint) from None


class Lines:
    """The lines of the values in a valid YAML text, which is parsed once."""

    def __init__(self, text: str) -> None:
        loader = _Loader(text)
        try:
            self._root: Any = loader.get_single_node()
        finally:
            loader.dispose()
        self._entries: dict[int, dict[str | int, tuple[int, Any]]] = {}

    def line_of(self, location: Sequence[str | int]) -> int | None:
        """The line of a value, by keys and indexes; the line of its nearest parent if it does not exist."""
        node, found = self._root, None
        for part in location:
            entry = self._entries_in(node).get(part)
            if entry is None:
                break
            found, node = entry
        return found

    def _entries_in(self, node: Any) -> Mapping[str | int, tuple[int, Any]]:
        """Line and node of the values in a node, by key or index."""
        if id(node) not in self._entries:
            self._entries[id(node)] = dict(_inner(node))
        return self._entries[id(node)]


def _inner(node: Any) -> Iterator[tuple[str | int, tuple[int, Any]]]:
    """Key or index of the values in a node, with their lines and nodes."""
    if isinstance(node, MappingNode):
        yield from ((key.value, (key.start_mark.line + 1, value)) for key, value in node.value)
    elif isinstance(node, SequenceNode):
        yield from ((number, (item.start_mark.line + 1, item)) for number, item in enumerate(node.value))


def replaced(text: str, values: Mapping[tuple[str | int, ...], str]) -> str:
    """A valid YAML text with these texts as the scalars at these keys and indexes; all else stays as it is written.

    A scalar that aliases repeat is replaced at its anchor, one that is merged where it is written. Keys and indexes
    that do not exist are ignored.
    """
    loader = _Locating(text)
    try:
        root = loader.get_single_node()
        edits = {}
        for location, value in values.items():
            node = loader.node_at(root, location)
            if isinstance(node, ScalarNode) and node.end_mark.index in loader.starts:
                edits[loader.starts[node.end_mark.index]] = node.end_mark.index, value
        for start, (end, value) in sorted(edits.items(), reverse=True):
            text = text[:start] + _replacement(text[start:end], loader.scalar(value)) + text[end:]
    finally:
        loader.dispose()
    return text


class _Locating(_Loader):
    """Composes nodes, and knows where the text of each scalar starts: marks of nodes include anchors and tags."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.starts: dict[int, int] = {}

    def get_token(self) -> Any:
        token: Any = super().get_token()  # type: ignore[no-untyped-call]
        if isinstance(token, yaml.ScalarToken):
            self.starts[token.end_mark.index] = token.start_mark.index
        return token

    def node_at(self, node: Any, location: Sequence[str | int]) -> Any:
        """The node of the value at these keys and indexes below `node`, None if it does not exist."""
        for part in location:
            if isinstance(node, MappingNode):
                self.flatten_mapping(node)  # merged keys come first, those that replace them last
            node = dict(_inner(node)).get(part, (0, None))[1]
        return node

    def scalar(self, value: str) -> str:
        """How to write a text so that it is read as this text, also in a flow mapping: quoted where that needs it."""
        tag: Any = self.resolve(ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
        if _PLAIN.fullmatch(value) and tag == f"{_TAG}str":
            return value
        letters = (json.dumps(each)[1:-1] if each <= "\uffff" else f"\\U{ord(each):08x}" for each in value)
        return f'"{"".join(letters)}"'


def _replacement(old: str, new: str) -> str:
    """The scalar `new` instead of `old`, of which the comment and the ends of lines stay if it is a block scalar."""
    header = _BLOCK.match(old)
    return new if header is None else f"{new}{header[1] or ''}{old[len(old.rstrip()) :]}"


def _check_keys(node: MappingNode) -> None:
    """Raise _Refused for a key that is not text or occurs twice, also the key << of merged mappings.

    Mappings are checked before merged ones are expanded: the keys of these may occur again, and those that are merged
    where they are written are never constructed.
    """
    seen = set()
    for key, _ in node.value:
        merges = key.tag == _MERGE
        if not isinstance(key, ScalarNode) or not (merges or key.tag == f"{_TAG}str"):
            raise _Refused(f"the key {_shown(key)} is not text: put it in quotes", key)
        name = "<<" if merges else key.value
        if (merges, name) in seen:
            raise _Refused(f"the key {name} occurs twice", key)
        seen.add((merges, name))


def _shown(node: Node) -> str:
    return repr(node.value[:40]) if isinstance(node, ScalarNode) else "a mapping or sequence"
