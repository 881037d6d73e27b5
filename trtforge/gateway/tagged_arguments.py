"""Converts a call's arguments in tags to JSON; each gets the type in its function's schema.

If a tag says that a value is a string, it is one where the schema allows it.
"""

import json

from trtforge.core.call_forms import ParameterTags
from trtforge.core.stop_text import overlap
from trtforge.gateway.argument_types import TEXT, ArgumentTypes, Types, as_json

_LONGEST_HEAD, _LONGEST_END = 400, 40


class TaggedArguments:
    """Reads the arguments of one call. `types`: of its function's arguments. `closed`: they are complete."""

    def __init__(self, tags: ParameterTags, types: ArgumentTypes) -> None:
        self._tags = tags
        self._of_arguments = types
        self._types: Types | None = None  # of the present value
        self._choices = frozenset[str]()  # its listed values; white space around them is ignored
        self._searched = 0  # its characters that were searched for an end
        self._made = ""
        self._count = 0
        self._stop_word = ""
        self.closed = False

    @property
    def ended(self) -> bool:
        """Whether nothing more belongs to them, as `closed`."""
        return self.closed

    @property
    def waits(self) -> bool:
        """Whether nothing can be returned before the `>` of a tag."""
        return self._types is not None and not self._is_text

    @property
    def _is_text(self) -> bool:
        """Whether the value is a string with any text, which is returned as it arrives."""
        return self._types == TEXT and not self._choices

    def of(self, text: str, reason: str | None, stop_word: str = "") -> tuple[int, str]:
        """The number of characters of the next text that were read, and their JSON.

        `reason`: the finish reason with the last text, else None; `stop_word`: the one that the answer was cut before.
        """
        at, self._made, goes_on = 0, "", True
        reason, self._stop_word = "length" if stop_word else reason, stop_word
        while goes_on:
            read = self._between if self._types is None else self._value
            size, goes_on = read(text[at:], reason)
            at += size
        return at, self._made

    def _between(self, text: str, reason: str | None) -> tuple[int, bool]:
        """Read up to the next value; anything but a parameter's tag, as a stop word may be, ends the arguments."""
        if head := self._tags.head.match(text):
            name = head["name"].strip()
            self._types, self._choices = self._of_arguments.of(name)
            if head.groupdict().get("string") and self._types >= TEXT:
                self._types = TEXT
            self._made += f"{self._separator()}{json.dumps(name, ensure_ascii=False)}: "
            self._made += '"' if self._is_text else ""
            return head.end(), True
        ahead = text.lstrip()
        begins = self._tags.begins_with
        known = f"{text}{self._stop_word}".lstrip()
        may_be = len(text) <= _LONGEST_HEAD and (begins.startswith(known) or known.startswith(begins))
        if may_be and reason in (None, "length"):
            return 0, False
        self._made += "}" if self._count else "{}"
        self.closed = True
        return len(text) - len(ahead), False

    def _separator(self) -> str:
        self._count += 1
        return "{" if self._count == 1 else ", "

    def _value(self, text: str, reason: str | None) -> tuple[int, bool]:
        """Read a value: all of it, or the available part of a string. A value may end with the answer."""
        assert self._types is not None
        end = self._tags.end.search(text, max(0, self._searched - _LONGEST_END))
        held = max(overlap(text, each) for each in self._tags.ends)
        if end is None and reason in (None, "length"):
            size = len(text) - (held if reason is None else 0) if self._is_text else 0
            self._made += escaped(text[:size])
            self._searched = len(text) - size
            return size, False
        value = text[: end.start() if end else len(text) - held]
        value = value.removesuffix("\n") if end and self._tags.lines else value
        bare = value.strip()
        value = bare if bare in self._choices else value
        self._made += f'{escaped(value)}"' if self._is_text else as_json(value, self._types)
        self._types, self._searched = None, 0
        return end.end() if end else len(text), True


def escaped(text: str) -> str:
    """The text within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
