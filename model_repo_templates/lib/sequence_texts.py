"""The texts that one request returns: one for each sequence and beam, extended as token ids arrive."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from trtforge.core.detokenizer import Detokenizer
from trtforge.core.stop_text import StopText

_CONTEXT = 32
"""Tokens of a prompt that the text of the next one depends on, and more."""


class SequenceText:
    """The text of one returned sequence (or beam) so far."""

    def __init__(self, detokenizer: Detokenizer, stop: StopText) -> None:
        self._detokenizer = detokenizer
        self._stop = stop

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """The new text, and how many tokens it took: none after a stop word."""
        texts: list[str] = []
        for token in ids:
            if self._stop.found:
                break
            texts.append(self._stop.push(self._detokenizer.push((token,))))
        return "".join(texts), len(texts)

    def flush(self) -> str:
        """The text held back, at the end of the sequence."""
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()

    @property
    def stopped(self) -> bool:
        """Whether a stop word was found."""
        return self._stop.found


class SequenceTexts:
    """The texts of one request's `sequences`.

    `context`: ids of the prompt if its text goes on in the answer, with the space that a tokenizer puts between them;
    `words`: stop words that are compared as text, and returned if `include_words`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        words: Sequence[str],
        sequences: int,
        *,
        include_words: bool = True,
    ) -> None:
        self._tokenizer, self._context = tokenizer, context[-_CONTEXT:]
        self._words, self._include_words = words, include_words
        self.sequences = sequences
        self._texts: dict[int, list[SequenceText]] = {}

    def push(self, sequence: int, beams: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """The new text of every beam of a sequence, and how many of its tokens come up to a stop word's end."""
        if sequence not in self._texts:
            self._texts[sequence] = [self._begin() for _ in beams]
        return [text.push(ids) for text, ids in zip(self._texts[sequence], beams, strict=True)]

    def flush(self, sequence: int) -> list[str]:
        """The text of every beam of a sequence that was held back."""
        return [text.flush() for text in self._texts[sequence]]

    def stopped(self, sequence: int) -> bool:
        """Whether a stop word was found in every beam of a sequence."""
        return all(text.stopped for text in self._texts[sequence])

    def _begin(self) -> SequenceText:
        return SequenceText(
            Detokenizer(self._tokenizer, self._context), StopText(self._words, included=self._include_words)
        )
