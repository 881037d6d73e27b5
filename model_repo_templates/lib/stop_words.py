"""Stop words compared as text: also finds those that the tokenizer splits differently in context than alone."""

from collections.abc import Sequence


class StopWords:
    """Searches one sequence's text for the first stop word, which is returned too, as with token-level matching."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word for word in words if word]
        self._kept = max((len(word) for word in self._words), default=1) - 1
        self._tail = ""
        self.found = False

    def push(self, text: str) -> str:
        """`text` up to the end of the first stop word; empty once one was found."""
        if self.found or not self._words:
            return "" if self.found else text
        seen = self._tail + text
        ends = [seen.find(word) + len(word) for word in self._words if word in seen]
        if ends:
            self.found = True
            return text[: max(0, min(ends) - len(self._tail))]
        self._tail = seen[max(0, len(seen) - self._kept) :]
        return text
