"""English prompts of a given number of tokens, for measuring a server's speed."""

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from pathlib import Path

from trtforge.formats.stdlib_text import stdlib_documents
from trtforge.formats.tokenizer import load_tokenizer

Count = Callable[[str], int | None]
"""Returns the number of tokens of a text by the server's count; None if the server does not report it."""

_WORDS_OF_A_TOKEN = 0.7  # if the server does not count
_FIRST_SHARE, _SHARES = 0.3, (0.9, 1.0, 1.0, 1.0)  # of the wanted tokens, from below: the engine may accept no more
_NEAR = 16  # characters around a token's end that are tried as cuts
_STEP = 7919  # words between the starts of successive prompts, a prime


class BenchPrompts:
    """Texts of `tokens` tokens by the server's count, each starting with its number, so that no two begin alike.

    `tokenizer`: the served tokenizer.json, with which the length is exact. Without it, all prompts are rotations of the
    same words, whose number is chosen by the server's count; lengths then differ by a few tokens.
    """

    def __init__(self, tokens: int, tokenizer: Path | None, counted: Count) -> None:
        self._tokens = tokens
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self._numbers, self._more, self._words = count(1), _endless_words(), list[str]()
        self._size = max(1, round(tokens * _FIRST_SHARE * _WORDS_OF_A_TOKEN))
        text = self._text()
        found = counted(text)
        if found is None:
            self._size = max(1, round(tokens * _WORDS_OF_A_TOKEN))
        elif self._tokenizer is not None:
            self._tokens = max(1, tokens - (found - self._count(text)))  # the server adds special tokens
        else:
            for share in _SHARES:
                self._size = max(1, round(self._size * share * tokens / found))
                found = counted(self._text()) or found
                if abs(found - tokens) <= max(1, tokens // 100):
                    break

    def next(self) -> str:
        """The next prompt."""
        if self._tokenizer is None:
            return self._text()
        text = self._text()
        while self._count(text) < self._tokens:
            self._size *= 2
            text = self._text()
        return self._cut(text)

    def _text(self) -> str:
        """The text's number and the words, rotated to a different start."""
        self._words += islice(self._more, max(0, self._size - len(self._words)))
        number = next(self._numbers)
        start = number * _STEP % self._size
        return f"{number}. {' '.join(chain(self._words[start : self._size], self._words[:start]))}"

    def _cut(self, text: str) -> str:
        """The start of a text with the wanted number of tokens, or the nearest, as a cut may change the tokens at its
        end."""
        assert self._tokenizer is not None
        end: int = self._tokenizer.encode(text, add_special_tokens=False).offsets[self._tokens - 1][1]
        cuts = sorted(range(max(1, end - _NEAR), min(len(text), end + _NEAR) + 1), key=lambda cut: abs(cut - end))
        return min((text[:cut] for cut in cuts), key=lambda start: abs(self._count(start) - self._tokens))

    def _count(self, text: str) -> int:
        assert self._tokenizer is not None
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _endless_words() -> Iterator[str]:
    while True:
        for document in stdlib_documents("held_out"):
            yield from document.split()
