"""Answers in Harmony, the form of gpt-oss: messages of several channels, between tokens that tokenizers call special.

Source: the Harmony response format of OpenAI's cookbook (developers.openai.com/cookbook/articles/openai-harmony).
"""

import re
from collections.abc import Callable

from trtforge.core.stop_text import overlap

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = frozenset({START, END, MESSAGE, CHANNEL, CALL, RETURN, CONSTRAIN})
CALL_HEAD = f"{CHANNEL}commentary to=functions."
"""How the call of a function begins, up to its name."""
_BEGINNINGS = (CHANNEL, " to=functions.")
_MARKS = (START, END, CHANNEL, CALL, RETURN)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.-]*)")


class HarmonyText:
    """The text of one answer in, its reasoning and its other text out. An answer in another form is all text.

    Reasoning is what the model writes to the channel `analysis` or to a tool that is no function. Calls of functions
    are part of the text: `CALL_HEAD`, the name, `<|message|>`, the arguments, and at their end `<|call|>`.
    """

    def __init__(self) -> None:
        self._held = ""
        self._reasoning = self._text = ""
        self._read: Callable[[bool], bool] = self._beginning
        self._reasons = self._calls = False
        self._begun: set[bool] = set()  # whether there was a message of reasoning, and another one

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """New reasoning and new other text; nothing is held back after the `last`."""
        self._held += text
        self._reasoning = self._text = ""
        while self._read(last):
            pass
        return self._reasoning, self._text

    def _beginning(self, last: bool) -> bool:
        if not last and any(mark.startswith(self._held) for mark in _BEGINNINGS):
            return False
        self._read = self._header if self._held.startswith(_BEGINNINGS) else self._other
        return True

    def _other(self, last: bool) -> bool:
        """An answer in another form."""
        self._text, self._held = self._held, ""
        return False

    def _header(self, last: bool) -> bool:
        """Up to a message: its channel, and to whom it is written."""
        header, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            return False
        self._held = rest
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._calls = recipient is not None and recipient[1] is not None
        thinks = channel is not None and channel[1] == "analysis"
        self._reasons = not self._calls and (thinks or recipient is not None)
        if recipient is not None and self._calls:
            self._text += f"{CALL_HEAD}{recipient[2]}{MESSAGE}"
        else:
            self._say("\n" if self._reasons in self._begun else "")
            self._begun.add(self._reasons)
        self._read = self._body
        return True

    def _body(self, last: bool) -> bool:
        """A message, up to the mark that ends it."""
        mark = _MARK.search(self._held)
        held = 0 if last or mark else max(overlap(self._held, each) for each in _MARKS)
        size = mark.start() if mark else len(self._held) - held
        self._say(self._held[:size])
        self._held = self._held[size:]
        if mark and self._calls:
            self._text += CALL
        self._read = self._header if mark else self._body
        return mark is not None

    def _say(self, text: str) -> None:
        if self._reasons:
            self._reasoning += text
        else:
            self._text += text
