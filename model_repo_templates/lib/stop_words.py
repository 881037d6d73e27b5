"""Stop words compared as text: also finds those that the tokenizer splits differently in context than alone."""

from collections.abc import Sequence


class StopWords:
    """Searches one sequence's text for the first stop word: the one that is complete first.

    `included`: the stop word is returned too, as with token-level matching. Otherwise text that may be the beginning
    of one is held back until more text, or `flush`, shows that it is not.
    """

    def __init__(self, words: Sequence[str], *, included: bool = True) -> None:
        self._words = [word for word in words if word]
        self._included = included
        self._kept = max((len(word) for word in self._words), default=1) - 1
        self._tail = ""  # the end of the text so far: all that was returned if `included`, else nothing of it
        self.found = False

    def push(self, text: str) -> str:
        """The text to return, up to the first stop word; empty once one was found."""
        if self.found or not self._words:
            return "" if self.found else text
        seen = self._tail + text
        found = [(start + len(word), start) for word in self._words if (start := seen.find(word)) >= 0]
        if self._included:
            if found:
                self.found = True
                return text[: max(0, min(found)[0] - len(self._tail))]
            self._tail = seen[max(0, len(seen) - self._kept) :]
            return text
        if found:
            self.found = True
            return seen[: min(found)[1]]
        held = max((size for word in self._words for size in _beginnings(word, seen)), default=0)
        self._tail = seen[len(seen) - held :]
        return seen[: len(seen) - held]

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        held = "" if self._included or self.found else self._tail
        self._tail = ""
        return held


def _beginnings(word: str, text: str) -> list[int]:
    """The lengths of the beginnings of `word` that `text` ends with."""
    return [size for size in range(1, min(len(word), len(text) + 1)) if text.endswith(word[:size])]
