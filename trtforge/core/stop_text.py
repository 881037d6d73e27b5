"""Stop words compared as text: also finds those that the tokenizer splits differently in context than alone.

The Python API, the gateway and the text models of a repository use it; models whose servers have no trtforge include
this module.
"""

from collections.abc import Sequence


class StopText:
    """Releases one sequence's text up to the first stop word: the one that is complete first.

    `included`: the stop word is released too, as where token ids are compared. Otherwise text that may be the beginning
    of one is held back until more text, or `flush`, shows that it is not.
    """

    def __init__(self, words: Sequence[str], *, included: bool = False) -> None:
        self._words = [word for word in words if word]
        self._included = included
        self._kept = max((len(word) for word in self._words), default=1) - 1
        self._tail = ""  # the end of the text so far: released if `included`, else held back
        self.found = False
        self.word = ""
        """The stop word that was found."""

    def push(self, text: str) -> str:
        """The text that can be released now; empty once a stop word was found."""
        if self.found or not self._words:
            return "" if self.found else text
        seen = self._tail + text
        found = [(start + len(word), start) for word in self._words if (start := seen.find(word)) >= 0]
        if self._included:
            if found:
                self._end(seen, *min(found))
                return text[: max(0, min(found)[0] - len(self._tail))]
            self._tail = seen[max(0, len(seen) - self._kept) :]
            return text
        if found:
            self._end(seen, *min(found))
            return seen[: min(found)[1]]
        held = max(overlap(seen, word) for word in self._words)
        self._tail = seen[len(seen) - held :]
        return seen[: len(seen) - held]

    def _end(self, seen: str, end: int, start: int) -> None:
        self.found, self.word = True, seen[start:end]

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        held = "" if self._included or self.found else self._tail
        self._tail = ""
        return held


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`, but not the whole word."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
