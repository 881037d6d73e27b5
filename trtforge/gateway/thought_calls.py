"""Calls in reasoning that the model does not close: the reasoning ends before the first of them.

A call that is followed by the closing tag of the reasoning is only a draft, about which the model thinks.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from trtforge.core.errors import ForgeError
from trtforge.core.harmony import HarmonyText
from trtforge.core.json_text import parse_json
from trtforge.core.reasoning import NewReader, ReasoningText, begun_thought, may_begin_thought
from trtforge.core.stop_text import overlap
from trtforge.gateway.call_reader import CallDelta, CallReader
from trtforge.gateway.sequence import NewAnswerReader
from trtforge.gateway.tools import ToolUse

_MOST_DRAFTS = 20
"""The most incomplete calls of one answer that are skipped; no more are tried, as each takes time."""


class ThoughtCalls:
    """The reasoning of one answer. From the beginning of a call on, it is held back until its end is known."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._search = CallReader(use, begins=False)
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Take more reasoning; returns what is reasoning in any case."""
        self._held.append(text)
        if self._search.found:
            return ""
        shown = _before_calls(self._search.push(text, None))
        if shown:
            self._held = ["".join(self._held)[len(shown) :]]
        return shown

    def close(self) -> str:
        """The rest of the reasoning, as the model closed it."""
        held, self._held = "".join(self._held), []
        return held

    def end(self, reason: str, stop_word: str) -> tuple[str, str]:
        """The rest of the reasoning, with which the answer ends, and the text from its first complete call on.

        `reason`, `stop_word`: see CallReader.push.
        """
        held, start = self.close(), 0
        for _ in range(_MOST_DRAFTS):
            told = CallReader(self._use, begins=False).push(held[start:], reason, stop_word)
            call = next((each for each in told if isinstance(each, CallDelta)), None)
            if call is None:
                break
            at = start + len(_before_calls(told))
            at += len(held) - at - len(held[at:].lstrip())
            if _is_complete(call):
                return held[:at], held[at:]
            start = at + 1
        return held, ""


class ThoughtReader:
    """Separates the reasoning in one answer from its text, to which calls in reasoning that is not closed belong."""

    def __init__(self, reader: ReasoningText, use: ToolUse) -> None:
        self._reader = reader
        self._calls = ThoughtCalls(use)

    def parts(self, text: str, reason: str | None, stop_word: str = "") -> list[tuple[str, str]]:
        """See AnswerReader."""
        reasoning, said = self._reader.push(text, last=reason is not None)
        if not self._reader.reasons:
            return [(self._calls.close() + reasoning, said)]
        shown = self._calls.push(reasoning)
        if reason is None:
            return [(shown, "")]
        rest, said = self._calls.end(reason, stop_word)
        return [((shown + rest).rstrip() if said else shown + rest, said)]


def with_calls(new_reader: NewReader | None, use: ToolUse | None) -> NewAnswerReader | None:
    """Creates readers of answers that may call functions."""
    if new_reader is None or use is None:
        return new_reader

    def new(prompt_thought: str | None) -> ThoughtReader | HarmonyText:
        reader = new_reader(prompt_thought)
        return ThoughtReader(reader, use) if isinstance(reader, ReasoningText) else reader

    return new


class AnswerCalls:
    """Splits the text of one answer, which may begin with reasoning between tags, into text for the user and calls."""

    def __init__(self, use: ToolUse) -> None:
        self._reader = CallReader(use)
        self._thought = ThoughtCalls(use)
        self._unread = ""
        self._thought_end = ""
        self._read: Callable[[str, str | None, str], Sequence[str | CallDelta]]
        self._read = self._reader.push if use.mode == "named" else self._opening

    def push(self, text: str, reason: str | None, stop_word: str = "") -> Sequence[str | CallDelta]:
        """See CallReader.push."""
        return self._read(text, reason, stop_word)

    @property
    def found(self) -> bool:
        """Whether the answer contains a call."""
        return self._reader.found

    @property
    def cut(self) -> bool:
        """Whether the latest call has no end."""
        return self._reader.cut

    def _opening(self, text: str, reason: str | None, stop_word: str) -> Sequence[str | CallDelta]:
        """State: the answer may begin with reasoning."""
        text = self._unread + text
        ahead = text.lstrip()
        tags = begun_thought(ahead)
        if tags is None and may_begin_thought(ahead) and reason is None:
            self._unread = text
            return ()
        self._unread, self._thought_end = "", tags[1] if tags else ""
        self._read = self._within_thought if tags else self._reader.push
        return self._read(text, reason, stop_word)

    def _within_thought(self, text: str, reason: str | None, stop_word: str) -> Sequence[str | CallDelta]:
        """State: text up to the end of the reasoning."""
        text, self._unread = self._unread + text, ""
        end = text.find(self._thought_end)
        if end < 0 and reason is None:
            sure = len(text) - overlap(text, self._thought_end)
            self._unread = text[sure:]
            self._reader.skip(self._thought.push(text[:sure]))
            return self._reader.push("", None)
        if end >= 0:
            end += len(self._thought_end)
            thought, rest = self._thought.close() + text[:end], text[end:]
        else:
            shown = self._thought.push(text)
            before, rest = self._thought.end(reason or "", stop_word)
            thought = shown + before
        self._reader.skip(thought)
        self._read = self._reader.push
        return self._reader.push(rest, reason, stop_word)


def _before_calls(told: Sequence[str | CallDelta]) -> str:
    """The text before the first call, without white space at its end."""
    return "".join(str(each) for each in takewhile(lambda each: isinstance(each, str), told))


def _is_complete(call: CallDelta) -> bool:
    """Whether the whole of a call is one that can be executed, unlike the draft `{"name": "f", "arguments": {...}}`."""
    try:
        return call.last and isinstance(parse_json(call.arguments, "the call", hint="", unique=False), dict)
    except ForgeError:
        return False
