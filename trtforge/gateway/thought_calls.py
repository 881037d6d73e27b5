"""Calls in reasoning that the model does not close: if the answer ends with calls, the reasoning ends before them.

A call that text or the closing tag of the reasoning follows is only a draft, about which the model thinks.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from trtforge.core.reasoning import NewReader, ReasoningText, begun_thought, may_begin_thought
from trtforge.core.stop_text import overlap
from trtforge.gateway.answer_marks import AnswerTags, PlainReader
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.call_reader import CallReader
from trtforge.gateway.final_calls import final_calls
from trtforge.gateway.sequence import AnswerReader, NewAnswerReader
from trtforge.gateway.tools import ToolUse


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
        """The rest of the reasoning, because the model closed it."""
        held, self._held = "".join(self._held), []
        return held

    def end(self, stop_word: str) -> tuple[str, str]:
        """The rest of the reasoning, with which the answer ends, and the text from its final calls on.

        `stop_word`: the one that the answer was cut before.
        """
        held = self.close()
        start = final_calls(held, self._use, stop_word)
        return (held, "") if start is None else (held[:start], held[start:])


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
        rest, said = self._calls.end(stop_word)
        return [((shown + rest).rstrip() if said else shown + rest, said)]


def with_calls(
    new_reader: NewReader | None, use: ToolUse | None, *, continues: bool = False, asked: str = ""
) -> NewAnswerReader | None:
    """Creates readers of answers, which may call functions.

    `continues`: the prompt ends with the text of a message, in which marks of the template count as text; `asked`: see
    AnswerTags.
    """
    if new_reader is None:
        return None

    def new(prompt_thought: str | None) -> PlainReader:
        separated = new_reader(prompt_thought)
        reader: AnswerReader = separated
        if isinstance(separated, ReasoningText):
            reader = AnswerTags(separated if use is None else ThoughtReader(separated, use), separated, asked)
        prompted = None if continues else prompt_thought
        return PlainReader(reader, prompted, () if use is None else use.names)

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
            before, rest = self._thought.end(stop_word)
            thought = shown + before
        self._reader.skip(thought)
        self._read = self._reader.push
        return self._reader.push(rest, reason, stop_word)


def _before_calls(told: Sequence[str | CallDelta]) -> str:
    """The text before the first call, without white space at its end."""
    return "".join(str(each) for each in takewhile(lambda each: isinstance(each, str), told))
