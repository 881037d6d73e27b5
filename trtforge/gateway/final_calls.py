"""Finds the calls with which a text ends."""

import re
from collections.abc import Iterable
from dataclasses import replace

from trtforge.core.call_forms import MARK
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.call_reader import CallReader
from trtforge.gateway.tools import ToolUse

_ONE_TAG = re.compile(rf"(?:{MARK.pattern})\s*")
_IN_VAIN, _EACH_IN_VAIN = 100_000, 1_000
"""How many characters are read in vain beyond the length of the text, and how many each try counts besides its own."""


def final_calls(text: str, use: ToolUse, stop_word: str) -> int | None:
    """Where the calls begin with which a text ends; None if it does not end with any.

    The first of them is complete. Only white space, closing tags and further complete calls follow it, and the last
    call or closing tag may be cut. `stop_word`: the one that the text was cut before.
    """
    return _FinalCalls(text, use, stop_word).start() if use.mode == "auto" else None


class _FinalCalls:
    """Reads from the tags of a text to its end, the last tag first. Each read ends at text, or at the calls found."""

    def __init__(self, text: str, use: ToolUse, stop_word: str) -> None:
        self._text = text
        self._use = replace(use, several=True)
        self._stop_word = stop_word
        self._tags = [*(mark.start() for mark in MARK.finditer(text)), len(text)]
        self._end = len(self._tags) - 1
        self._left = len(text) + _IN_VAIN
        self._first: int | None = None  # of the tags, the number of the one that begins the first known call
        self._cut: int | None = None  # and of the one that begins a last call that is cut

    def start(self) -> int | None:
        """Where the first call begins; None without calls."""
        tag = self._end - 1
        while tag >= 0 and self._left > 0:
            two = tag > 0 and _ONE_TAG.fullmatch(self._text, self._tags[tag - 1], self._tags[tag]) is not None
            if not (two and self._takes(tag - 1)):  # two tags may begin one call, as `<tool_call><function=` does
                self._takes(tag)
            tag -= 2 if two else 1
        return None if self._first is None else self._tags[self._first]

    def _takes(self, tag: int) -> bool:
        """Add the text from a tag to the calls that are known, if it is a call that they or the end follow."""
        if self._first is not None:
            ends = [self._first]
        else:
            ends = [self._end] if self._cut is None else [self._cut, self._end]
        if any(self._is_call(tag, end) for end in ends):
            self._first = tag
        return tag in (self._first, self._cut)

    def _is_call(self, first: int, end: int) -> bool:
        """Whether the text between two tags is complete calls. If it ends the whole text, the last one may be cut."""
        is_last, calls = end == self._end, list[CallDelta]()
        reader = CallReader(self._use, begins=False)
        for tag in range(first, end):
            told = reader.push(self._text[self._tags[tag] : self._tags[tag + 1]], None)
            if not _add(calls, told):
                return self._in_vain(first, tag + 1)
        is_cut = not _add(calls, reader.push("", "length", self._stop_word if is_last else ""))
        complete = [_is_complete(call) for call in calls]
        if is_last and calls and not calls[-1].last:
            complete, is_cut = complete[:-1], True
        if complete and all(complete) and (is_last or not is_cut):
            return True
        if is_last and not complete and is_cut:
            self._cut = first
        return self._in_vain(first, end)

    def _in_vain(self, first: int, end: int) -> bool:
        self._left -= self._tags[end] - self._tags[first] + _EACH_IN_VAIN
        return False


def _add(calls: list[CallDelta], told: Iterable[str | CallDelta]) -> bool:
    """Add new data of calls; returns whether there is no text beside it."""
    for each in told:
        if isinstance(each, str):
            return False
        if each.name is None:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + each.arguments, last=each.last)
        else:
            calls.append(each)
    return True


def _is_complete(call: CallDelta) -> bool:
    """Whether the whole of a call is one that can be executed, unlike the draft `{"name": "f", "arguments": {...}}`."""
    try:
        return call.last and isinstance(parse_json(call.arguments, "the call", hint="", unique=False), dict)
    except ForgeError:
        return False
