"""One returned sequence: converts pieces to deltas for the client. Stop words are cut off, as in OpenAI's API."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trtforge.core.stop_text import StopText
from trtforge.gateway.request import Piece, TextRequest, TokenScore

CANCELLED = "cancelled"


@dataclass(slots=True)
class Delta:
    """The new part of one choice: `reasoning`, then `text`.

    In its last delta, `finish_reason` is "stop" or "length", and `stop_word` is the one that the answer was cut before.
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    logprobs: Sequence[TokenScore] = field(default=())
    reasoning: str = ""
    stop_word: str = ""


class AnswerReader(Protocol):
    """Separates the reasoning in one answer from its text."""

    def parts(self, text: str, reason: str | None, stop_word: str = "") -> list[tuple[str, str]]:
        """Take a piece; returns pairs of new reasoning and new other text in their order.

        `reason`: the finish reason with the last text, else None; `stop_word`: the one that the answer was cut before.
        """


NewAnswerReader = Callable[[str | None], AnswerReader]
"""Creates the reader of an answer; takes `Piece.prompt_thought` of its first piece."""


class AnswerSequence:
    """The state of one sequence of a request. `index`: of its choice.

    `new_reader`: creates what separates reasoning from text, once the first piece has come.
    """

    def __init__(self, request: TextRequest, index: int, new_reader: NewAnswerReader | None = None) -> None:
        self._request = request
        self._index = index
        self._stop = StopText(request.stop) if request.stop else None
        self._new_reader = new_reader
        self._reader: AnswerReader | None = None
        self._scores: deque[tuple[int, TokenScore]] = deque()
        self._received = 0
        self._released = 0
        self.output_tokens: int | None = None
        self.finished = False

    def take(self, piece: Piece) -> list[Delta]:
        """The deltas of a piece; none if it adds nothing. `finished` may be set before the server's last piece."""
        if piece.output_tokens is not None:
            self.output_tokens = piece.output_tokens
        if self.finished:
            return []
        if self._reader is None and self._new_reader is not None:
            self._reader = self._new_reader(piece.prompt_thought)
        text, scores = piece.text, piece.logprobs
        reason: str | None = piece.finish_reason or None
        stop_word = ""
        if self._stop is not None:
            text = self._stop.push(text)
            if reason is not None:
                text += self._stop.flush()
            reason, stop_word = "stop" if self._stop.found else reason, self._stop.word
            if scores or self._scores:
                scores = self._released_scores(scores, text, last=reason is not None)
            self._released += len(text.encode())
        self.finished = reason is not None
        told = [("", text)] if self._reader is None else self._reader.parts(text, reason, stop_word)
        deltas = [Delta(self._index, text, reasoning=reasoning) for reasoning, text in told if reasoning or text]
        if not deltas and (scores or reason is not None):
            deltas = [Delta(self._index)]
        if deltas:
            deltas[-1].finish_reason, deltas[-1].logprobs, deltas[-1].stop_word = reason, scores, stop_word
        return deltas

    def end(self) -> list[Delta]:
        """The last deltas, for servers that give no finish reason; empty if the last one was sent."""
        if self.finished:
            return []
        tokens = self.output_tokens
        length = tokens is not None and tokens >= self._request.max_tokens
        return self.take(Piece(finish_reason="length" if length else "stop"))

    def _released_scores(self, scores: Sequence[TokenScore], text: str, *, last: bool) -> Sequence[TokenScore]:
        """The scores of tokens that begin in the released text; all of them at the end without a stop word."""
        for score in scores:
            self._scores.append((self._received, score))
            self._received += len(bytes(score["bytes"]))
        assert self._stop is not None
        everything = last and not self._stop.found
        end = self._released + len(text.encode())
        released = []
        while self._scores and (everything or self._scores[0][0] < end):
            released.append(self._scores.popleft()[1])
        return released
