"""Answers in Harmony, the form of gpt-oss: messages of several channels, between tokens that tokenizers call special.

Source: the Harmony response format of OpenAI's cookbook (developers.openai.com/cookbook/articles/openai-harmony).
"""

import re
from collections.abc import Callable, Collection

from trtforge.core.stop_text import overlap

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = frozenset({START, END, MESSAGE, CHANNEL, CALL, RETURN, CONSTRAIN})
_FUNCTIONS = "functions."
CALL_HEAD = f"{CHANNEL}commentary to={_FUNCTIONS}"
"""How the call of a function begins, up to its name."""
_BEGINNINGS = (CHANNEL, " to=")
_MARKS = (START, END, CHANNEL, CALL, RETURN)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_ENDED = rf"(?:{re.escape(END)}|{re.escape(CALL)}|{re.escape(RETURN)})?"
_HEADER = re.compile(
    rf"{_ENDED}\s{{0,9}}(?:{re.escape(START)}assistant)?(?:\s{{0,9}}to=(?P<to>[\w.-]{{1,80}}))?\s{{0,9}}"
    rf"(?:{re.escape(CHANNEL)}(?P<channel>analysis|commentary|final))?(?:\s{{1,9}}to=(?P<then>[\w.-]{{1,80}}))?\s{{0,9}}"
    rf"(?:{re.escape(CONSTRAIN)})?\s{{0,9}}\w{{0,20}}{re.escape(MESSAGE)}"
)
_HEADER_SO_FAR = re.compile(rf"(?:{re.escape(START)}|{re.escape(CHANNEL)})[\w|>=. <-]*")
_LONGEST_HEADER = 300


class HarmonyText:
    """The text of one answer in, its reasoning and its other text out. An answer in another form is all text.

    Reasoning is what the model writes to the channel `analysis`, and to tools of its own such as `python`. Messages to
    `functions.NAME`, and to one of the `functions` by its name alone, are calls. They are part of the text:
    `CALL_HEAD`, the name, `<|message|>`, the arguments, and `<|call|>` unless the answer ends.
    """

    def __init__(self, functions: Collection[str] = ()) -> None:
        self._functions = functions
        self._held = ""
        self._told: list[tuple[str, str]] = []
        self._read: Callable[[bool], bool] = self._beginning
        self._reasons = self._calls = False  # what the message that is read is
        self._call_head = ""  # of a call whose arguments have not begun
        self._cut = False
        self._has_reasoned = self._has_said = False

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """New reasoning and new other text; nothing is held back after the `last`."""
        told = self.parts(text, "stop" if last else None)
        return "".join(reasoning for reasoning, _ in told), "".join(said for _, said in told)

    def parts(self, text: str, reason: str | None, stop_word: str = "") -> list[tuple[str, str]]:
        """As `push`, in the order in which the model wrote them: one of each pair is empty.

        `reason`: the finish reason with the last text, else None; `stop_word`: the one that the answer was cut before.
        Of a call that a limit or a stop word cut before its arguments nothing is left. A stop word that is a mark ends
        the call as the mark does.
        """
        self._held += text
        self._told, self._cut = [], not stop_word.startswith(_MARKS) if stop_word else reason == "length"
        while self._read(reason is not None):
            pass
        return self._told

    def _beginning(self, last: bool) -> bool:
        if header := self._held.startswith(_BEGINNINGS) and _HEADER.match(self._held):
            self._begin(header)
            return True
        may_be = self._held.startswith(_BEGINNINGS) or any(mark.startswith(self._held) for mark in _BEGINNINGS)
        if may_be and not last and len(self._held) <= _LONGEST_HEADER:
            return False
        self._read = self._other
        return True

    def _other(self, last: bool) -> bool:
        """An answer in another form."""
        self._say(self._held)
        self._held = ""
        return False

    def _header(self, last: bool) -> bool:
        """From the mark that ends a message up to the next message."""
        if header := _HEADER.match(self._held):
            self._begin(header)
            return True
        if len(self._held) <= _LONGEST_HEADER and (not last or _is_cut_header(self._held)):
            return False
        self._reasons = self._calls = False
        mark = _MARK.match(self._held)
        if mark and mark[0] in (START, CHANNEL):
            self._say(mark[0])
        self._held = self._held[mark.end() if mark else 0 :]
        self._read = self._body
        return True

    def _begin(self, header: re.Match[str]) -> None:
        """A message: whether it is reasoning, text or a call, by its channel and by whom it is written to."""
        self._held = self._held[header.end() :]
        to = header["to"] or header["then"]
        function = (to or "").removeprefix(_FUNCTIONS)
        self._calls = function != (to or "") or function in self._functions
        self._reasons = not self._calls and (to is not None or header["channel"] == "analysis")
        self._call_head = f"{CALL_HEAD}{function}{MESSAGE}" if self._calls else ""
        if self._reasons:
            self._say("\n" if self._has_reasoned else "")
            self._has_reasoned = True
        elif not self._calls:
            self._say("\n" if self._has_said else "")
            self._has_said = True
        self._read = self._body

    def _body(self, last: bool) -> bool:
        """A message, up to the mark that ends it."""
        mark = _MARK.search(self._held)
        held = 0 if last or mark else max(overlap(self._held, each) for each in _MARKS)
        text = self._held[: mark.start() if mark else len(self._held) - held]
        if self._call_head and not text.strip():
            if not mark and (self._cut or not last):
                return False
            self._say(f"{self._call_head}{{}}")
        else:
            self._say(self._call_head + text)
        self._call_head = ""
        self._held = self._held[len(text) :]
        if mark and self._calls:
            self._say(CALL)
        self._read = self._header if mark else self._body
        return mark is not None

    def _say(self, text: str) -> None:
        if text:
            self._told.append((text, "") if self._reasons else ("", text))


def _is_cut_header(text: str) -> bool:
    """Whether an answer that ends with this text ends within the header of a message, or after one message."""
    mark = _MARK.match(text)
    rest = text[mark.end() :].lstrip() if mark and mark[0] not in (START, CHANNEL) else text
    return any(each.startswith(rest) for each in (START, CHANNEL)) or _HEADER_SO_FAR.fullmatch(rest) is not None
