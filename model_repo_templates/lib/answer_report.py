"""What a client is told of an answer besides its text.

Why it ended, token counts, log probabilities, and whether the prompt ended within reasoning.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from input_names import CONTEXT_ONLY
from numpy.typing import NDArray
from text_engine import Piece
from text_options import TextOptions
from token_texts import ScoredTexts, as_json

_REASONS = {"end_id": "stop", "stop_word": "stop", "length": "length", "cancelled": "cancelled"}


@dataclass(slots=True)
class _Sequence:
    generated: int = 0
    reason: str = ""
    pending: list[object] = field(default_factory=list)
    prompt: Sequence[object] | None = None
    begins: bool = True
    cached: int | None = None
    cached_told: bool = False
    thought_told: bool = False


class AnswerReport:
    """The report of one request. `prompt`: its token ids; `most_tokens`: how many its output may have.

    `after_prompt`: the text of the output follows that of the prompt. `prompt_thought`: the opening tag of reasoning
    with which the prompt of messages ends, "" if it ends with none; None: the prompt is not of messages.
    """

    def __init__(
        self,
        options: TextOptions,
        prompt: Sequence[int],
        most_tokens: int,
        texts: ScoredTexts,
        *,
        after_prompt: bool = False,
        prompt_thought: str | None = None,
    ) -> None:
        self._options = options
        self._prompt = prompt
        self._most_tokens = most_tokens
        self._texts = texts
        self._after_prompt = after_prompt
        self._prompt_thought = prompt_thought
        self._sequences: dict[int, _Sequence] = {}

    def take(self, piece: Piece, *, stopped: bool) -> None:
        """Add a piece. `stopped`: a stop word in the text ended the sequence."""
        state = self._sequences.setdefault(piece.sequence, _Sequence(begins=not self._after_prompt))
        tokens = piece.beams[0] if piece.beams else []
        state.generated += len(tokens)
        if self._options.logprobs and tokens:
            values = piece.log_probs or [None] * len(tokens)
            state.pending += self._texts.scored(tokens, values, piece.top_log_probs, begins=state.begins)
            state.begins = state.begins and self._texts.begin(tokens)
        if state.cached is None:  # later pieces of a drafted answer tell what it left itself
            state.cached = piece.cached_tokens
        if piece.prompt_log_probs is not None and self._options.prompt_logprobs:
            values, top = piece.prompt_log_probs
            state.prompt = self._texts.prompt(self._prompt, [None, *values], [(), *top] if top else ())
        if stopped:
            state.reason = "stop"
        elif piece.finished:
            state.reason = self._why_ended(piece.reason, state.generated)

    def _why_ended(self, reason: str, generated: int) -> str:
        """For clients. `reason`: the engine's, if any. `not_finished`: a context ended with its first token."""
        told = _REASONS.get(reason)
        if self._options.request_type == CONTEXT_ONLY and told in (None, "length") and generated:
            return "length" if generated >= self._most_tokens else "not_finished"
        return told or ("length" if generated >= self._most_tokens else "stop")

    def has_news(self, sequence: int) -> bool:
        """Whether a response must be sent even without text."""
        state = self._sequences[sequence]
        ends = bool(state.reason) and (
            self._options.finish_reason or self._options.num_output_tokens or self._has_cached(state)
        )
        return ends or bool(state.pending) or state.prompt is not None

    def tensors(self, sequence: int) -> dict[str, NDArray[Any]]:
        """The tensors of the next response of a sequence, with batch dimension."""
        state, options = self._sequences[sequence], self._options
        tensors: dict[str, NDArray[Any]] = {}
        if options.finish_reason:
            tensors["finish_reason"] = _text(state.reason.encode())
        if options.num_input_tokens:
            tensors["num_input_tokens"] = np.array([[len(self._prompt)]], dtype=np.int32)
        if options.num_output_tokens:
            tensors["num_output_tokens"] = np.array([[state.generated]], dtype=np.int32)
        if self._has_cached(state):
            tensors["num_cached_tokens"] = np.array([[state.cached]], dtype=np.int32)
            state.cached_told = True
        if options.prompt_thought and self._prompt_thought is not None and not state.thought_told:
            tensors["prompt_thought"] = _text(self._prompt_thought.encode())
            state.thought_told = True
        if options.logprobs:
            tensors["logprobs"] = _text(as_json(state.pending))
            state.pending = []
        if state.prompt is not None:
            tensors["prompt_logprobs"] = _text(as_json(state.prompt))
            state.prompt = None
        return tensors

    def _has_cached(self, state: _Sequence) -> bool:
        return self._options.num_cached_tokens and state.cached is not None and not state.cached_told


def _text(value: bytes) -> NDArray[np.object_]:
    return np.array([[value]], dtype=object)
