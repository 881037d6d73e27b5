"""Protobuf's text format (Triton's config.pbtxt), parsed without a schema and without protobuf.

Grammar: protobuf.dev/reference/protobuf/textformat-spec, without extension and Any names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

from trtforge.core.errors import ForgeError
from trtforge.core.reading import MIB, read_limited

_TOKEN = re.compile(
    r"""(?P<space>[\s]+|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?[fF]?)(?![\w.]))
    |(?P<name>-?[A-Za-z_]\w*)
    |(?P<mark>[:{}<>\[\],;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_NAMED = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
MOST_BYTES = 4 * MIB
_LAST_CHARACTER, _REPLACEMENT = 0x10FFFF, 0xFFFD
_DEEPEST = 100  # protobuf's own nesting limit
_CLOSING = {"{": "}", "<": ">"}


class Name(str):
    """A bare word: true, false, or a member of an enumeration."""

    __slots__ = ()


Value = Union[str, int, float, Name, "Message"]


@dataclass
class Message:
    """The fields of a message, each with its values in order; non-repeated fields have one value."""

    fields: dict[str, list[Value]] = field(default_factory=dict)

    def messages(self, name: str) -> list["Message"]:
        """The messages of a field."""
        return [value for value in self.fields.get(name, ()) if isinstance(value, Message)]

    def text(self, name: str, default: str = "") -> str:
        """A string field."""
        found = self._last(name)
        return found if isinstance(found, str) and not isinstance(found, Name) else default

    def integer(self, name: str, default: int = 0) -> int:
        """A whole number."""
        found = self._last(name)
        return found if isinstance(found, int) else default

    def flag(self, name: str) -> bool:
        """A boolean; false if absent."""
        return self._last(name) in (Name("true"), Name("True"), Name("t"), 1)

    def _last(self, name: str) -> Value | None:
        values = self.fields.get(name)
        return values[-1] if values else None


def read_message(path: Path) -> Message:
    """The message in a file; bytes that are not UTF-8 are replaced. Raises ForgeError naming the file."""
    data = read_limited(path, MOST_BYTES, hint="Give the original file of the model repository.")
    return parse(data.decode("utf-8", errors="replace"), str(path))


def parse(text: str, where: str) -> Message:
    """Parse a text. Raises ForgeError naming `where` and the line of a syntax error."""
    reader = _Reader(text, where)
    message = reader.message(None)
    assert reader.kind == "end"
    return message


class _Reader:
    """A recursive-descent parser; `kind` and `word` are the next token."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        self._tokens = self._tokenize()
        self.kind, self.word, self._line = "end", "", 1
        self._depth = 0
        self._next()

    def message(self, closing: str | None) -> Message:
        """Fields up to the closing mark, or to the end of the text."""
        found = Message()
        while self.word != closing or self.kind != "mark":
            if self.kind == "end" and closing is None:
                return found
            if self.kind != "name":
                raise self._error("a field name")
            name = self.word
            self._next()
            if self._is(":"):
                self._next()
            elif not any(self._is(mark) for mark in "{<["):  # only before messages is the colon optional
                raise self._error("':' or '{'")
            found.fields.setdefault(name, []).extend(self._values())
            if self._is(",") or self._is(";"):
                self._next()
        self._next()
        return found

    def _values(self) -> list[Value]:
        if not self._is("["):
            return [self._value()]
        self._next()
        values: list[Value] = []
        while not self._is("]"):
            values.append(self._value())
            if self._is(","):
                self._next()
                if self._is("]"):
                    raise self._error("a value")
            elif not self._is("]"):
                raise self._error("',' or ']'")
        self._next()
        return values

    def _value(self) -> Value:
        kind, word = self.kind, self.word
        if kind == "mark" and word in _CLOSING:
            self._next()
            if self._depth == _DEEPEST:
                raise self._error(f"at most {_DEEPEST} nested messages")
            self._depth += 1
            found = self.message(_CLOSING[word])
            self._depth -= 1
            return found
        if kind == "string":
            parts = b""
            while self.kind == "string":
                parts += _unescaped(self.word[1:-1])
                self._next()
            return parts.decode("utf-8", errors="replace")
        if kind not in ("number", "name"):
            raise self._error("a value")
        self._next()
        return Name(word) if kind == "name" else _number(word)

    def _is(self, mark: str) -> bool:
        return self.kind == "mark" and self.word == mark

    def _next(self) -> None:
        self.kind, self.word, self._line = next(self._tokens)

    def _tokenize(self) -> Iterator[tuple[str, str, int]]:
        position, line = 0, 1
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                self._line = line
                self.word = self._text[position]
                raise self._error("protobuf text format")
            if match.lastgroup != "space":
                yield str(match.lastgroup), match.group(), line
            line += match.group().count("\n")
            position = match.end()
        while True:
            yield "end", "the end", line

    def _error(self, wanted: str) -> ForgeError:
        return ForgeError(
            f"{self._where}, line {self._line}: expected {wanted}, found {self.word}",
            hint="Correct the line; a ${placeholder} outside quotes has to be filled first.",
        )


def _number(word: str) -> int | float:
    digits = word.lstrip("+-")
    try:
        if digits[:2] in ("0x", "0X"):
            value = int(digits, 16)
        elif len(digits) > 1 and digits[0] == "0" and digits.isdecimal():
            value = int(digits, 8)
        else:
            value = int(digits)
    except ValueError:
        return float(word.rstrip("fF"))
    return -value if word.startswith("-") else value


def _unescaped(text: str) -> bytes:
    def replaced(match: re.Match[bytes]) -> bytes:
        octal, byte, short, long, other = match.groups()
        if octal is not None:
            return bytes([int(octal, 8) & 0xFF])
        if byte is not None:
            return bytes([int(byte, 16)])
        if short is not None or long is not None:
            code = int(short or long, 16)
            return chr(code if code <= _LAST_CHARACTER else _REPLACEMENT).encode("utf-8", errors="replace")
        return _NAMED.get(other, other)

    return _ESCAPE.sub(replaced, text.encode("utf-8"))
