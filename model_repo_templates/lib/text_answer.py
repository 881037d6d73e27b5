"""The answer to one text request: pieces of tokens come, responses of text go out.

What streaming must remember (incomplete characters, spaces, stop words) is here, one object a request.
"""

from collections.abc import Callable, Mapping

import numpy as np
from responder import Responder
from sequence_texts import SequenceTexts
from text_engine import Piece

SEQUENCE = "sequence_index"
_ADDED = ("output_log_probs",)  # outputs whose values are of the new tokens only, along the last dimension


class TextAnswer:
    """Sends a response for every piece when `streaming`, else one for each sequence when it is complete.

    `prompt`: text before each answer. `outputs`: the engine's outputs that are passed on, by the names that they get.
    `on_stopped`: called when stop words have ended every sequence before the engine did.
    """

    def __init__(
        self,
        call: Responder,
        texts: SequenceTexts,
        outputs: Mapping[str, str],
        *,
        streaming: bool,
        prompt: str,
        on_stopped: Callable[[], None],
    ) -> None:
        self._call = call
        self._texts = texts
        self._outputs = outputs
        self._streaming = streaming
        self._prompt = prompt
        self._on_stopped = on_stopped
        self._unfinished: set[int] = set(range(texts.sequences))
        self._whole: dict[int, list[str]] = {}
        self._passed: dict[int, dict[str, np.ndarray]] = {}

    def take(self, pieces: list[Piece]) -> None:
        """Take what the engine made since the last call."""
        for piece in pieces:
            if piece.sequence not in self._unfinished or self._call.done:
                continue
            if piece.failure is not None:
                self._call.fail(*piece.failure)
                self._unfinished.clear()
                self._on_stopped()
                return
            self._take(piece)

    def _take(self, piece: Piece) -> None:
        new = self._texts.push(piece.sequence, piece.beams)
        stopped = not piece.finished and self._texts.stopped(piece.sequence)
        finished = piece.finished or stopped
        if finished:
            last = self._texts.flush(piece.sequence)
            new = [text + held for text, held in zip(new, last, strict=True)]
            self._unfinished.discard(piece.sequence)
        passed = {self._outputs[name]: value for name, value in piece.outputs.items() if name in self._outputs}
        if self._streaming:
            self._send_piece(new, passed, final=not self._unfinished)
        else:
            self._keep(piece.sequence, new, passed)
            if finished:
                self._send_whole(piece.sequence, final=not self._unfinished)
        if stopped and not self._unfinished:
            self._on_stopped()

    def _send_piece(self, texts: list[str], passed: dict[str, np.ndarray], *, final: bool) -> None:
        """Nothing is sent for a step that gave no text (a character is not complete) and no other output."""
        if any(texts) or passed.keys() - {SEQUENCE}:
            self._call.send({"text_output": _strings(texts), **passed}, final=final)
        elif final:
            self._call.finish()

    def _keep(self, sequence: int, texts: list[str], passed: dict[str, np.ndarray]) -> None:
        before = self._whole.get(sequence) or [self._prompt] * len(texts)
        self._whole[sequence] = [whole + text for whole, text in zip(before, texts, strict=True)]
        kept = self._passed.setdefault(sequence, {})
        for name, value in passed.items():
            kept[name] = np.concatenate([kept[name], value], axis=-1) if name in _ADDED and name in kept else value

    def _send_whole(self, sequence: int, *, final: bool) -> None:
        self._call.send({"text_output": _strings(self._whole[sequence]), **self._passed[sequence]}, final=final)


def _strings(texts: list[str]) -> np.ndarray:
    return np.array([[text.encode() for text in texts]], dtype=object)
