"""The answer to one text request: pieces of tokens in, responses of text out.

One object per request keeps the state of streaming: incomplete characters, spaces, stop words.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from answer_report import AnswerReport
from numpy.typing import NDArray
from responder import Responder
from sequence_texts import SequenceTexts
from text_engine import Piece

SEQUENCE = "sequence_index"
_ADDED = {"output_log_probs": -1, "generation_logits": 2}
"""Outputs that hold only the new tokens' values, and the dimension of the tokens."""
_SUM = "cum_log_probs"


class TextAnswer:
    """Sends a response for every piece when `streaming`, else one for each sequence when it is complete.

    `prompt`: text before each answer. `outputs`: engine output to the name under which it is passed on. `report`: what
    is told besides.
    `on_stopped`: called when stop words have ended every sequence before the engine did, and after a failure.
    """

    def __init__(
        self,
        call: Responder,
        texts: SequenceTexts,
        outputs: Mapping[str, str],
        report: AnswerReport,
        *,
        streaming: bool,
        prompt: str,
        on_stopped: Callable[[], None],
    ) -> None:
        self._call = call
        self._texts = texts
        self._outputs = outputs
        self._report = report
        self._streaming = streaming
        self._prompt = prompt
        self._on_stopped = on_stopped
        self._unfinished: set[int] = set(range(texts.sequences))
        self._whole: dict[int, list[str]] = {}
        self._passed: dict[int, dict[str, NDArray[Any]]] = {}

    def take(self, pieces: list[Piece]) -> None:
        """Take the pieces that arrived since the last call."""
        for piece in pieces:
            if self._call.done:
                return
            if piece.failure is not None:  # of the whole request, even if this sequence has ended
                self._call.fail(*piece.failure)
                self._unfinished.clear()
                self._on_stopped()
            elif piece.sequence in self._unfinished:
                self._take(piece)

    def _take(self, piece: Piece) -> None:
        pushed = self._texts.push(piece.sequence, piece.beams)
        new = [text for text, _ in pushed]
        if len(pushed) == 1:
            piece = _first(piece, pushed[0][1])
        stopped = not piece.finished and self._texts.stopped(piece.sequence)
        finished = piece.finished or stopped
        if finished:
            last = self._texts.flush(piece.sequence)
            new = [text + held for text, held in zip(new, last, strict=True)]
            self._unfinished.discard(piece.sequence)
        passed = {self._outputs[name]: value for name, value in piece.outputs.items() if name in self._outputs}
        self._report.take(piece, stopped=self._texts.stopped(piece.sequence))
        if self._streaming:
            self._send_piece(piece.sequence, new, passed, final=not self._unfinished)
        else:
            self._keep(piece.sequence, new, passed)
            if finished:
                self._send_whole(piece.sequence, final=not self._unfinished)
        if stopped and not self._unfinished:
            self._on_stopped()

    def _send_piece(self, sequence: int, texts: list[str], passed: dict[str, NDArray[Any]], *, final: bool) -> None:
        """Send a piece, unless it has neither text (an incomplete character) nor another output."""
        if any(texts) or passed.keys() - {SEQUENCE} or self._report.has_news(sequence):
            tensors = {**passed, **self._report.tensors(sequence)}
            self._call.send({"text_output": _strings(texts), **tensors}, final=final)
        elif final:
            self._call.finish()

    def _keep(self, sequence: int, texts: list[str], passed: dict[str, NDArray[Any]]) -> None:
        before = self._whole.get(sequence) or [self._prompt] * len(texts)
        self._whole[sequence] = [whole + text for whole, text in zip(before, texts, strict=True)]
        kept = self._passed.setdefault(sequence, {})
        for name, value in passed.items():
            if name in _ADDED and name in kept:
                value = np.concatenate([kept[name], value], axis=_ADDED[name])
            kept[name] = value

    def _send_whole(self, sequence: int, *, final: bool) -> None:
        tensors = {**self._passed[sequence], **self._report.tensors(sequence)}
        self._call.send({"text_output": _strings(self._whole[sequence]), **tensors}, final=final)


def _first(piece: Piece, count: int) -> Piece:
    """A piece of one beam without the tokens after its first ones: how many came together shall make no difference."""
    (ids,) = piece.beams
    if count == len(ids):
        return piece
    outputs = dict(piece.outputs)
    for name, axis in _ADDED.items():
        if name in outputs:
            outputs[name] = np.take(outputs[name], range(count), axis)
    if _SUM in outputs:
        outputs[_SUM] = outputs[_SUM] - np.float32(sum(value or 0.0 for value in piece.log_probs[count:]))
    return replace(
        piece,
        beams=[ids[:count]],
        outputs=outputs,
        log_probs=piece.log_probs[:count],
        top_log_probs=piece.top_log_probs[:count],
    )


def _strings(texts: list[str]) -> NDArray[np.object_]:
    return np.array([[text.encode() for text in texts]], dtype=object)
