"""Converts a call's arguments in literals, as Python's or Gemma 4's, to JSON as they come.

The notations are in `core/call_forms.py`. Strings come as they are written; numbers and other words once they are
complete.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from trtforge.core.call_forms import LiteralNotation
from trtforge.core.stop_text import overlap
from trtforge.gateway.argument_types import ANY, ArgumentTypes, Types, as_json
from trtforge.gateway.tagged_arguments import escaped

_CLOSING = {"{": "}", "[": "]", "(": ")"}
_BLANK = re.compile(r"\s*")
_LONGEST_NAME, _LONGEST_WORD = 256, 1000
_NAME = re.compile(rf"[^\s,:=<>()\[\]{{}}'\"]{{0,{_LONGEST_NAME}}}")
_WORD = re.compile(rf"[^,<()\[\]{{}}'\"]{{0,{_LONGEST_WORD}}}")
_ENDS = {True: re.compile(r"\s{0,99}:"), False: re.compile(r"\s{0,99}(?:[,)\]}]|<\|)")}
"""What follows the quote that ends a string, by whether the string is a name. Models leave quotes in strings as they
are: other quotes belong to the string."""
_ENDS_SO_FAR = re.compile(r"\s{0,99}<?")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuU0-7]|)", re.DOTALL)
_ESCAPE_SO_FAR = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_ESCAPED |= {each: each for each in "\\'\""}
_INTEGER = re.compile(r"[+-]?\d{1,100}")
_FRACTION = re.compile(r"[+-]?(?:\d{1,100}\.?\d{0,100}|\.\d{1,100})(?:[eE][+-]?\d{1,9})?")
_NUMBERS = frozenset({"integer", "number"})
_DEEPEST = 50


@dataclass
class _Bracket:
    """An object or an array that is open. `end`: the character that closes it; `count`: of its values so far."""

    end: str
    is_object: bool
    count: int = 0


class LiteralArguments:
    """Reads the arguments of one call. `types`: of its function's arguments.

    `ended`: nothing more belongs to them; `closed`: they are complete, otherwise what follows is not in the notation.
    """

    waits = False

    def __init__(self, notation: LiteralNotation, types: ArgumentTypes) -> None:
        self._notation = notation
        self._of_arguments = types
        self._types: Types = ANY  # of the present argument
        self._open = [_Bracket(notation.end, is_object=True)]
        self._read: Callable[[], bool] = self._item
        self._quote = ""  # of the string that is read
        self._is_name = False  # whether that string is the name of a value
        self._text, self._at, self._last = "", 0, False
        self._made: list[str] = []
        self.ended = self.closed = False

    def of(self, text: str, reason: str | None, stop_word: str = "") -> tuple[int, str]:
        """The number of characters of the next text that were read, and their JSON; see `TaggedArguments.of`."""
        self._text, self._at, self._last = text, 0, reason is not None
        while not self.ended and self._read():
            pass
        made, self._made = "".join(self._made), []
        return self._at, made

    def _shown(self) -> str:
        """The next character that is not white space, which is read; "" if it has not come."""
        blank = _BLANK.match(self._text, self._at)
        self._at = blank.end() if blank else self._at
        return self._text[self._at : self._at + 1]

    def _item(self) -> bool:
        """State: the next value of a bracket, or its end."""
        shown = self._shown()
        if shown == self._open[-1].end:
            return self._end()
        if shown:
            self._read = self._name if self._open[-1].is_object else self._value
        return bool(shown)

    def _name(self) -> bool:
        """State: the name of a value."""
        shown = self._shown()
        if len(self._open) > 1 or not self._notation.escapes:
            quoted = self._begins_string(is_name=True)
            if quoted is not None:
                self._types = ANY
                return quoted
        found = _NAME.match(self._text, self._at)
        assert found is not None
        if shown and not found[0]:
            return self._other()
        if found.end() == len(self._text) and len(found[0]) < _LONGEST_NAME:
            return False
        if len(self._open) == 1:
            self._types, _ = self._of_arguments.of(found[0])
        self._separate()
        self._made.append(f"{json.dumps(found[0], ensure_ascii=False)}: ")
        self._at, self._read = found.end(), self._assignment
        return True

    def _assignment(self) -> bool:
        """State: the character between a name and its value."""
        shown = self._shown()
        if shown and shown != (self._notation.assigns if len(self._open) == 1 else ":"):
            return self._other()
        self._at += len(shown)
        self._read = self._value if shown else self._read
        return bool(shown)

    def _value(self) -> bool:
        """State: a value."""
        shown = self._shown()
        if shown in self._notation.opens and shown:
            self._separate_element()
            self._open.append(_Bracket(_CLOSING[shown], is_object=shown == "{"))
            self._made.append("{" if shown == "{" else "[")
            self._at, self._read = self._at + 1, self._item
            return True if len(self._open) <= _DEEPEST else self._other()
        quoted = self._begins_string(is_name=False)
        if quoted is not None:
            return quoted
        found = _WORD.match(self._text, self._at)
        assert found is not None
        if found.end() == len(self._text) and len(found[0]) < _LONGEST_WORD:
            return False
        following = self._text[found.end() : found.end() + 1]
        if not following or following not in f",<{''.join(_CLOSING.values())}":
            return self._other()
        self._separate_element()
        self._made.append(_word(found[0].strip(), self._types if len(self._open) == 1 else ANY))
        self._at, self._read = found.end(), self._after
        return True

    def _after(self) -> bool:
        """State: the text after a value."""
        shown = self._shown()
        if shown == self._open[-1].end:
            return self._end()
        if shown and shown != ",":
            return self._other()
        self._at += len(shown)
        self._read = self._item if shown else self._read
        return bool(shown)

    def _end(self) -> bool:
        """End a bracket."""
        bracket = self._open.pop()
        self._at, self._read = self._at + 1, self._after
        self.ended = self.closed = not self._open
        opens = "{" if self.closed and not bracket.count else ""
        self._made.append(opens + ("}" if bracket.is_object else "]"))
        return True

    def _other(self) -> bool:
        """What follows is not in the notation."""
        self.ended = True
        return True

    def _separate(self) -> None:
        bracket = self._open[-1]
        bracket.count += 1
        if bracket.count > 1:
            self._made.append(", ")
        elif len(self._open) == 1:
            self._made.append("{")

    def _separate_element(self) -> None:
        if not self._open[-1].is_object:
            self._separate()

    def _begins_string(self, *, is_name: bool) -> bool | None:
        """Read the quote before a string, if there is one. False: more text decides; None: there is none."""
        ahead = self._text[self._at : self._at + len(self._notation.quotes[0])]
        quote = next((quote for quote in self._notation.quotes if ahead.startswith(quote)), None)
        if not self._last and any(len(ahead) < len(each) and each.startswith(ahead) for each in self._notation.quotes):
            return False
        if quote is None:
            return None
        if is_name:
            self._separate()
        else:
            self._separate_element()
        self._made.append('"')
        self._at += len(quote)
        self._quote, self._is_name, self._read = quote, is_name, self._string
        return True

    def _string(self) -> bool:
        """State: a string."""
        while True:
            end = self._text.find(self._quote, self._at)
            escape = self._text.find("\\", self._at, end if end >= 0 else None) if self._notation.escapes else -1
            if escape >= 0:
                self._made.append(escaped(self._text[self._at : escape]))
                self._at = escape
                if not self._escape():
                    return False
                continue
            if end < 0:
                held = 0 if self._last else overlap(self._text, self._quote)
                end = max(self._at, len(self._text) - held)
                self._made.append(escaped(self._text[self._at : end]))
                self._at = end
                return False
            self._made.append(escaped(self._text[self._at : end]))
            self._at = end
            ends = self._ends_string(end + len(self._quote))
            if ends is None:
                return False
            self._at += len(self._quote)
            if ends:
                break
            self._made.append(escaped(self._quote))
        self._made.append('": ' if self._is_name else '"')
        self._read = self._assignment if self._is_name else self._after
        return True

    def _ends_string(self, after: int) -> bool | None:
        """Whether the quote before `after` ends the string; None: more text decides."""
        if len(self._quote) > 1:
            return True
        if _ENDS[self._is_name].match(self._text, after):
            return True
        if _ENDS_SO_FAR.fullmatch(self._text, after):
            return True if self._last else None
        return False

    def _escape(self) -> bool:
        """Read an escape sequence of Python; returns False if it is not complete."""
        if not self._last and _ESCAPE_SO_FAR.fullmatch(self._text, self._at):
            return False
        found = _ESCAPE.match(self._text, self._at)
        assert found is not None
        self._made.append(_unescaped(found[0][1:]))
        self._at = found.end()
        return True


def _unescaped(code: str) -> str:
    """The JSON of an escape sequence, given without its backslash."""
    if code in _ESCAPED:
        return escaped(_ESCAPED[code])
    if code[:1] in ("x", "u", "U") and len(code) > 1:
        number = int(code[1:], 16)
    elif code.isdigit():
        number = int(code, 8)
    else:
        return escaped(f"\\{code}")
    if number > 0x10FFFF:
        return escaped(f"\\{code}")
    return f"\\u{number:04x}" if 0xD800 <= number < 0xE000 else escaped(chr(number))


def _word(text: str, types: Types) -> str:
    """The JSON of a word: of a number of Python too, such as `07` or `.5`, which JSON writes otherwise."""
    made = as_json(text, types)
    if not made.startswith('"') or types.isdisjoint(_NUMBERS):
        return made
    if _INTEGER.fullmatch(text):
        return as_json(str(int(text)), types)
    if _FRACTION.fullmatch(text) and math.isfinite(float(text)):
        return as_json(json.dumps(float(text)), types)
    return made
