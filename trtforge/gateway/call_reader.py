"""Reads the calls of functions in an answer's text as it comes: a name once it is known, then its arguments.

What a call looks like, `tool_calls.py` says. A whole answer is read as a stream is, in one piece.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.core.stop_text import overlap
from trtforge.gateway.json_end import JsonEnd
from trtforge.gateway.tools import ToolUse

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_BLANK = r"\s{0,99}"
_NAME = rf'"name"{_BLANK}:{_BLANK}"([A-Za-z0-9_-]{{1,64}})"'
_HEAD = rf'\{{{_BLANK}{_NAME}{_BLANK},{_BLANK}"(?:{"|".join(_ARGUMENTS)})"{_BLANK}:{_BLANK}(?=\{{)'
"""A call up to its arguments. Its length is bounded, so that a long text is not searched again for each token."""
_FIRST = re.compile(rf"{_BLANK}(\[?){_BLANK}{_HEAD}")
_NEXT = re.compile(rf"{_BLANK}([,;]?){_BLANK}{_HEAD}")
_LONGEST_HEAD = 1000


@dataclass(frozen=True)
class CallDelta:
    """What is new of the call with this `index` in its answer.

    `name`: with its first delta; `arguments`: more of their JSON; `last`: they are complete. A call without a last
    delta was cut, or its arguments are no JSON.
    """

    index: int
    arguments: str = ""
    name: str | None = None
    last: bool = False


class CallReader:
    """The text of one answer goes in; what is said to the user and the calls come out."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._unread = ""
        self._last = self._cut = False
        self._read: Callable[[], bool] = self._named if use.mode == "named" else self._beginning
        self._end = JsonEnd()
        self._after: Callable[[], bool] = self._text
        self._said = _Said()
        self._told: list[str | CallDelta] = []
        self._count = 0

    def push(self, text: str, reason: str | None) -> Sequence[str | CallDelta]:
        """What can be told after more text, in its order: text for the user, and what is new of calls.

        Text that may be part of a call is held back until more of it, or the end, decides. `reason`: the finish reason
        with the last text, else None.
        """
        self._unread += text
        self._last, self._cut = reason is not None, reason == "length"
        while self._read():
            pass
        self._say(last=self._last)
        told, self._told = self._told, []
        return told

    @property
    def found(self) -> bool:
        """Whether the answer has a call."""
        return self._count > 0

    def _named(self) -> bool:
        """The answer is nothing but arguments."""
        if not self._count:
            self._begin(self._use.names[0])
        self._add(self._take(len(self._unread)), last=self._last and not self._cut)
        return False

    def _beginning(self) -> bool:
        """The answer may be nothing but calls."""
        if head := self._known(_FIRST.match(self._unread)):
            self._take(head.end())
            self._begin(head[2])
            self._read, self._after = self._arguments, self._listed if head[1] else self._bare
            return True
        may_be = self._unread.lstrip()[:1] in ("", "{", "[") and not (
            self._use.mode == "auto" and _OPEN in self._unread
        )
        if may_be and not self._last:
            return False
        if may_be and self._parsed(self._unread):
            self._take(len(self._unread))
        self._read = self._text
        return True

    def _text(self) -> bool:
        """Text for the user, up to the next tag."""
        tags = self._use.mode == "auto"
        start = self._unread.find(_OPEN) if tags else -1
        if start >= 0:
            self._said.add(self._take(start))
            self._read = self._tag
            return True
        held = overlap(self._unread, _OPEN) if tags and not self._last else 0
        self._said.add(self._take(len(self._unread) - held))
        return False

    def _tag(self) -> bool:
        """A tag, and what follows it up to the arguments."""
        inside = self._unread[len(_OPEN) : len(_OPEN) + _LONGEST_HEAD]
        if (head := self._known(_FIRST.match(inside))) and not head[1]:
            self._take(len(_OPEN) + head.end())
            self._begin(head[2])
            self._read, self._after = self._arguments, self._closing_tag
            return True
        end = self._unread.find(_CLOSE)
        if end < 0 and not self._last:
            return False
        end = len(self._unread) if end < 0 else end
        if self._parsed(self._unread[len(_OPEN) : end]):
            self._take(end)
            self._read = self._closing_tag
        else:
            self._said.add(self._take(len(_OPEN)))
            self._read = self._text
        return True

    def _arguments(self) -> bool:
        """The arguments of the call that has begun."""
        size, ended = self._end.of(self._unread)
        self._add(self._take(size), last=self._end.closed)
        if ended:
            self._end = JsonEnd(depth=1)
            self._read = self._rest_of_call
        return ended

    def _rest_of_call(self) -> bool:
        """What follows the arguments in the object of a call, which has no effect."""
        size, ended = self._end.of(self._unread)
        self._take(size)
        if ended:
            self._read = self._after
        return ended

    def _closing_tag(self) -> bool:
        ahead = self._unread.lstrip()
        if ahead.startswith(_CLOSE):
            self._take(len(self._unread) - len(ahead) + len(_CLOSE))
        elif _CLOSE.startswith(ahead) and not self._last:
            return False
        self._read = self._text
        return True

    def _bare(self) -> bool:
        """After a call without a tag: another one (Llama 3.1 writes `;` between them), else text."""
        return self._follows(self._text, ("", ";"))

    def _listed(self) -> bool:
        """After a call in an array: the next one. All else is left out."""
        return self._follows(self._ignored, (",",))

    def _follows(self, otherwise: Callable[[], bool], marks: Sequence[str]) -> bool:
        head = self._known(_NEXT.match(self._unread))
        if head and head[1] in marks:
            self._take(head.end())
            self._begin(head[2])
            self._read = self._arguments
            return True
        ahead = self._unread.lstrip()
        if ahead[:1] in ("", "{", *marks) and len(self._unread) <= _LONGEST_HEAD and not self._last:
            return False
        self._read = otherwise
        return True

    def _ignored(self) -> bool:
        self._take(len(self._unread))
        return False

    def _known(self, head: "re.Match[str] | None") -> "re.Match[str] | None":
        return head if head and head[2] in self._use.names else None

    def _parsed(self, text: str) -> bool:
        """Whether a whole text is calls whose arguments do not come last; they come in one piece."""
        calls = _calls_in(self._use, text)
        for name, arguments in calls:
            self._begin(name)
            self._add(arguments, last=True)
        return bool(calls)

    def _begin(self, name: str) -> None:
        self._end = JsonEnd()
        self._said.end_part()
        self._say(last=False)
        self._count += 1
        if self._wanted():
            self._told.append(CallDelta(self._count - 1, name=name))

    def _add(self, arguments: str, *, last: bool) -> None:
        if not self._wanted():
            return
        index = self._count - 1
        before = self._told[-1] if self._told else None
        if isinstance(before, CallDelta) and before.index == index:
            self._told[-1] = replace(before, arguments=before.arguments + arguments, last=last)
        elif arguments or last:
            self._told.append(CallDelta(index, arguments, last=last))

    def _say(self, *, last: bool) -> None:
        if text := self._said.taken(last=last):
            self._told.append(text)

    def _wanted(self) -> bool:
        return self._use.several or self._count == 1

    def _take(self, size: int) -> str:
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken


class _Said:
    """Text around calls: without white space before the first, between them, and after the last one."""

    def __init__(self) -> None:
        self._ready = ""
        self._before = ""  # white space that ended the text before the latest calls
        self._blank = ""  # white space that ends the text since then
        self._says = self._calls = False

    def add(self, text: str) -> None:
        """More text of this part."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._ready += self._before + shown
            self._before, self._says = "", True

    def end_part(self) -> None:
        """A call begins."""
        if self._says:
            self._before = self._blank
        self._blank, self._says, self._calls = "", False, True

    def taken(self, *, last: bool) -> str:
        """What can be shown. `last`: all that is left, unless there were calls."""
        if last and not self._calls:
            self._ready += self._blank
            self._blank = ""
        ready, self._ready = self._ready, ""
        return ready


def _calls_in(use: ToolUse, text: str) -> Sequence[tuple[str, str]]:
    """Names and arguments of the calls in a JSON text: one, or an array of them; none if it is anything else."""
    try:
        values = parse_json(text, "the call", hint="", unique=False)
    except ForgeError:
        return []
    calls = [_call(use, value) for value in (values if isinstance(values, list) else [values])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(use: ToolUse, value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or value.get("name") not in use.names:
        return None
    arguments = next((value[name] for name in _ARGUMENTS if isinstance(value.get(name), dict)), None)
    return None if arguments is None else (value["name"], json.dumps(arguments, ensure_ascii=False))
