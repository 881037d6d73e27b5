"""The texts that one request returns: one for each sequence and beam, growing as token ids come."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from detokenizer import Detokenizer
from stop_text import StopText
from tokenizers import Tokenizer

OUTPUT_IDS, SEQUENCE_LENGTH, SEQUENCE = "output_ids", "sequence_length", "sequence_index"

Tensors = Mapping[str, np.ndarray]
"""The tensors of a request or a response, by name."""


class SequenceText:
    """The text of one returned sequence (or beam) so far."""

    def __init__(self, detokenizer: Detokenizer, stop: StopText) -> None:
        self._detokenizer = detokenizer
        self._stop = stop

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The new text; with `last` everything that is left."""
        new = self._detokenizer.push(ids)
        return self._stop.push(new + self._detokenizer.flush() if last else new)

    @property
    def stopped(self) -> bool:
        """Whether a stop word was found."""
        return self._stop.found


class Texts:
    """The texts of one request. `context`: ids of the prompt where it is returned too; `words`: stop words."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], words: Sequence[str]) -> None:
        self._tokenizer, self._context, self._words = tokenizer, context, words
        self._texts: dict[int, list[SequenceText]] = {}

    def push(self, outputs: Tensors) -> tuple[int, list[str]]:
        """The new text of every beam in an engine response, and which of the returned sequences it is."""
        index = int(outputs[SEQUENCE].flat[0]) if SEQUENCE in outputs else 0
        lengths = outputs[SEQUENCE_LENGTH][0]
        if index not in self._texts:
            self._texts[index] = [self._begin() for _ in lengths]
        beams = zip(self._texts[index], outputs[OUTPUT_IDS][0], lengths, strict=True)
        return index, [text.push(ids[:length].tolist()) for text, ids, length in beams]

    def flush(self) -> Iterator[tuple[int, list[str]]]:
        """What was held back, for every returned sequence."""
        for index, beams in sorted(self._texts.items()):
            yield index, [text.push([], last=True) for text in beams]

    @property
    def several(self) -> bool:
        """Whether more than one sequence is returned."""
        return len(self._texts) > 1

    @property
    def stopped(self) -> bool:
        """Whether a stop word was found in all of them."""
        return bool(self._texts) and all(text.stopped for beams in self._texts.values() for text in beams)

    def _begin(self) -> SequenceText:
        return SequenceText(Detokenizer(self._tokenizer, self._context), StopText(self._words))
