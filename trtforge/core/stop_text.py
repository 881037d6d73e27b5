"""Text as it comes, up to the first stop word: the one that is complete first."""

from collections.abc import Sequence


class StopText:
    """Releases text up to the first stop word; text that may be the beginning of one is held back."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be released now."""
        if self.found:
            return ""
        seen = self._held + text
        found = [(start + len(word), start) for word in self._words if (start := seen.find(word)) >= 0]
        if found:
            self.found, self._held = True, ""
            return seen[: min(found)[1]]
        kept = max((overlap(seen, word) for word in self._words), default=0)
        self._held = seen[len(seen) - kept :]
        return seen[: len(seen) - kept]

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`, but not the whole word."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
