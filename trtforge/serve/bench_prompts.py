"""English prompts of a number of tokens, for measuring a server's speed."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.formats.stdlib_text import stdlib_documents
from trtforge.formats.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CHARACTERS_OF_A_TOKEN = 4.0  # until the server has counted a prompt
_LEAST_CHARACTERS_OF_A_TOKEN = 2  # so that the first prompt is not longer than those that are asked for
_SPARE = 1.25  # text that is read for a prompt, as a multiple of what it is expected to need
_NEAR = 16  # characters around a token's end at which a cut is tried


class BenchPrompts:
    """Texts of `tokens` tokens as the server counts them, each with its number first: no two begin alike.

    `tokenizer`: the served tokenizer.json, with which the length is exact. Without it the length follows from what the
    server counted, and is exact to a few percent.
    """

    def __init__(self, tokens: int, tokenizer: Path | None = None) -> None:
        self._tokens = tokens
        self._tokenizer = None if tokenizer is None else _whole_texts(load_tokenizer(tokenizer))
        self._characters_of_a_token = _CHARACTERS_OF_A_TOKEN
        self._special = 0  # tokens that the server adds to a text
        self._numbers, self._documents, self._text = count(1), _endless_documents(), ""

    def first(self) -> str:
        """A text of at most the wanted length, whose tokens the server is to count."""
        return self._numbered(self._tokens * _LEAST_CHARACTERS_OF_A_TOKEN)

    def learn(self, prompt: str, tokens: int | None) -> None:
        """Take over how many tokens the server counted in a prompt; None: it does not tell."""
        if tokens:
            self._characters_of_a_token = len(prompt) / tokens
            self._special = tokens - self._count(prompt) if self._tokenizer is not None else 0

    def next(self) -> str:
        """The next prompt."""
        wanted = max(1, round(self._tokens * self._characters_of_a_token))
        if self._tokenizer is None:
            return self._numbered(wanted)
        own, size = max(1, self._tokens - self._special), round(wanted * _SPARE)
        text = self._numbered(size)
        while self._count(text) < own:
            text += self._taken(size)
        return self._cut(text, own)

    def _cut(self, text: str, tokens: int) -> str:
        """The start of a text with so many tokens; the nearest, if a cut there changes how its end is divided."""
        assert self._tokenizer is not None
        end: int = self._tokenizer.encode(text, add_special_tokens=False).offsets[tokens - 1][1]
        cuts = sorted(range(max(1, end - _NEAR), min(len(text), end + _NEAR) + 1), key=lambda cut: abs(cut - end))
        return min((text[:cut] for cut in cuts), key=lambda start: abs(self._count(start) - tokens))

    def _count(self, text: str) -> int:
        assert self._tokenizer is not None
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _numbered(self, characters: int) -> str:
        start = f"{next(self._numbers)}. "
        return start + self._taken(max(0, characters - len(start)))

    def _taken(self, characters: int) -> str:
        while len(self._text) < characters:
            self._text += f"{next(self._documents)}\n"
        taken, self._text = self._text[:characters], self._text[characters:]
        return taken


def _endless_documents() -> Iterator[str]:
    while True:
        yield from stdlib_documents("held_out")


def _whole_texts(tokenizer: "Tokenizer") -> "Tokenizer":
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
