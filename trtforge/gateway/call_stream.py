"""Text of an answer that is read in steps, and what is found in it."""

import re
from collections.abc import Callable, Sequence

from trtforge.core.call_forms import LONGEST_HEAD
from trtforge.gateway.call_output import CallDelta, CallOutput
from trtforge.gateway.tools import ToolUse

_PIECE = 4096
"""Characters of a long text that are read at once: each step copies the text that is not read yet."""


class CallStream:
    """The text that comes and the data that is told. Subclasses have states: each reads as much as it can.

    A state returns False if it needs more text, otherwise `_read` is the next state.
    """

    _read: Callable[[], bool]

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._unread = ""
        self._searched = 0  # its characters that were already searched without result
        self._pieces: list[str] = []  # later pieces of text
        self._awaited = ""  # the pieces need not be read before this character
        self._reason: str | None = None
        self._stop_word = ""
        self._output = CallOutput(several=use.several)

    def push(self, text: str, reason: str | None, stop_word: str = "") -> Sequence[str | CallDelta]:
        """Take more text; returns, in order, the text for the user and the new data of calls.

        Text that may be part of a call is held back until further text or the end decides. `reason`: the finish reason
        with the last text, else None; `stop_word`: the one that the answer was cut before.
        """
        self._push_pieces(text, reason, stop_word)
        return self._output.take(last=self._last)

    def _push(self, text: str, reason: str | None, stop_word: str) -> None:
        self._pieces.append(text)
        self._reason, self._stop_word = reason, stop_word
        if reason is None and self._awaited and self._awaited not in text:
            return
        self._unread += "".join(self._pieces)
        self._pieces, self._awaited = [], ""
        while self._read():
            pass

    def _push_again(self, text: str) -> None:
        """Read text again that was taken, in another state."""
        self._push_pieces(text, self._reason, self._stop_word)

    def _push_pieces(self, text: str, reason: str | None, stop_word: str) -> None:
        last = max(0, (len(text) - 1) // _PIECE) * _PIECE
        for start in range(0, last, _PIECE):
            self._push(text[start : start + _PIECE], None, "")
        self._push(text[last:], reason, stop_word)

    def skip(self, text: str) -> None:
        """Take text for the user that precedes the text of every `push`, and in which calls do not count."""
        self._output.skip(text)

    @property
    def _last(self) -> bool:
        return self._reason is not None

    @property
    def found(self) -> bool:
        """Whether the answer contains a call."""
        return self._output.count > 0

    @property
    def cut(self) -> bool:
        """Whether the latest call has no end."""
        return self._output.cut

    def _await_tag(self, last: str = ">") -> bool:
        """Wait for more text; if it is too long for the head of a call, only the `last` character of a tag matters."""
        self._awaited = last if len(self._unread) > LONGEST_HEAD else ""
        return False

    def _may_be_of(self, head_so_far: "re.Pattern[str]", start: int = 0) -> bool:
        """Whether the text from `start` on may become the head of a known function's call."""
        found, names = head_so_far.fullmatch(self._unread, start), self._use.names
        if found is None:
            return False
        named = found.groupdict()
        if (begun := named.get("name")) is None:
            return True
        return begun in names if named["whole"] else any(name.startswith(begun) for name in names)

    def _known(self, head: "re.Match[str] | None") -> "re.Match[str] | None":
        return head if head and head["name"] in self._use.names else None

    def _take(self, size: int) -> str:
        taken, self._unread = self._unread[:size], self._unread[size:]
        self._searched = 0
        return taken
