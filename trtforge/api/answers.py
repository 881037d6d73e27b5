"""Answers of the Python API: text, tokens, scores, logits and counts, whole and in pieces."""

from copy import copy
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from trtforge.api.hints import hinted
from trtforge.core.detokenizer import Detokenizer
from trtforge.core.reasoning import NewReader, Reader
from trtforge.core.stop_text import StopText
from trtforge.core.token_texts import TokenTexts
from trtforge.engine_process.context_phase import phase_after
from trtforge.engine_process.requests import CUT, FinishReason, GenerationRequest, Output, TopLogProbs

if TYPE_CHECKING:
    from collections.abc import Sequence

Logits = NDArray[np.float32]
EndReason = Literal["stop", "length", "cancelled", "timed_out", "not_finished"]
"""`stop`: the model ended, or a stop word occurred; `length`: max_tokens or the engine's max_seq_len was reached;
`timed_out`: its `allotted_time_ms` passed; `not_finished`: another engine will continue (`context_only`)."""
_REASONS: dict[FinishReason, EndReason] = {
    "end_id": "stop",
    "stop_word": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "timed_out": "timed_out",
}


@dataclass(frozen=True)
class TokenScore:
    """A token, its text and the natural logarithm of its probability; `top`: the most likely tokens at its position."""

    token: int
    text: str
    log_prob: float
    top: "tuple[TokenScore, ...]" = ()


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens. `reused_tokens`: tokens of the prompt whose keys and values were in the KV cache.

    `completion_tokens`: of all returned sequences or beams.
    """

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and completions."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Piece:
    """New text and tokens of the sequence `index` of an answer. Its last piece has a finish reason.

    The last piece of all has the usage. `context_logits` and `prompt_log_probs` come once, with the first sequence's
    first token. `reasoning`: the new reasoning before the text, with a `reasoning_parser` and for answers in Harmony.
    """

    text: str
    tokens: tuple[int, ...] = ()
    log_probs: tuple[TokenScore, ...] = ()
    finish_reason: EndReason | None = None
    usage: Usage | None = None
    index: int = 0
    reasoning: str = ""
    context_logits: Logits | None = field(default=None, repr=False, compare=False)
    generation_logits: Logits | None = field(default=None, repr=False, compare=False)
    prompt_log_probs: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One sequence or beam of an answer. `text` ends before a stop word; `tokens` may continue after it.

    `reasoning`: the text that the model wrote before its answer, may be ""; without `reasoning_parser` it is None,
    unless a chat's answer is in Harmony, gpt-oss's format, and contains reasoning. `cumulative_log_prob`: sum of
    `log_probs`; for a beam it is always known and includes the end id's. `generation_logits`: (tokens, vocabulary),
    from which each token was chosen, before all changes by sampling options.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: EndReason
    reasoning: str | None = None
    log_probs: tuple[TokenScore, ...] = ()
    cumulative_log_prob: float = 0.0
    generation_logits: Logits | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Answer:
    """A whole answer: one completion, `n` sequences in the order of their seeds, or beams with the best first.

    `text`, `tokens` and so on are the first completion's. `context_logits`: (tokens of the prompt, vocabulary); row i
    predicts token i + 1. `prompt_log_probs`: of the prompt's tokens except the first. `context_phase`: of a
    `context_only` request, for the engine that continues; None if it was cancelled or timed out.
    """

    completions: tuple[Completion, ...]
    usage: Usage
    context_logits: Logits | None = field(default=None, repr=False, compare=False)
    prompt_log_probs: tuple[TokenScore, ...] = ()
    context_phase: bytes | None = None

    @property
    def text(self) -> str:
        """The first completion's text; the following properties are also the first completion's."""
        return self.completions[0].text

    @property
    def reasoning(self) -> str | None:
        """The reasoning before the text, see `Completion`."""
        return self.completions[0].reasoning

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids."""
        return self.completions[0].tokens

    @property
    def finish_reason(self) -> EndReason:
        """Why the completion ended."""
        return self.completions[0].finish_reason

    @property
    def log_probs(self) -> tuple[TokenScore, ...]:
        """The tokens' scores."""
        return self.completions[0].log_probs

    @property
    def cumulative_log_prob(self) -> float:
        """Sum of the tokens' log probabilities."""
        return self.completions[0].cumulative_log_prob

    @property
    def generation_logits(self) -> Logits | None:
        """The logits of its tokens."""
        return self.completions[0].generation_logits


class SequenceText:
    """Converts the tokens of one sequence or beam to text and scores.

    `continues`: the text continues the prompt's; an answer to chat messages is a separate text. `reader`: separates the
    reasoning before the text.
    """

    def __init__(
        self,
        prompt: "Sequence[int]",
        stop: "Sequence[str]",
        texts: TokenTexts,
        index: int,
        *,
        continues: bool,
        reader: Reader | None = None,
    ) -> None:
        self._texts = texts
        self._text = Detokenizer(texts.tokenizer, prompt if continues else (), texts.special)
        self._begins = not continues
        self._stop = StopText(stop)
        self._reader = reader
        self._prompt, self._index = prompt, index
        self.count, self.cumulative_log_prob = 0, 0.0
        self.finished = False

    @property
    def stopped(self) -> bool:
        """Whether a stop word has occurred."""
        return self._stop.found

    def take(self, output: Output) -> Piece:
        """The piece of an output, without usage."""
        self.count += len(output.tokens)
        self.cumulative_log_prob += sum(output.log_probs)
        text = self._stop.push(self._text.push(output.tokens))
        if output.finish_reason is not None:
            text += self._stop.push(self._text.flush()) + self._stop.flush()
        reason = "stop" if self._stop.found else _REASONS.get(output.finish_reason) if output.finish_reason else None
        self.finished = reason is not None
        reasoning = ""
        if self._reader is not None:
            reasoning, text = self._reader.push(text, last=self.finished)
        return Piece(
            text,
            output.tokens,
            self._scores(output),
            reason,
            index=self._index,
            reasoning=reasoning,
            context_logits=_rows(output.context_logits, len(self._prompt)),
            generation_logits=_rows(output.generation_logits, len(output.tokens)),
            prompt_log_probs=self._prompt_scores(output),
        )

    def _scores(self, output: Output) -> tuple[TokenScore, ...]:
        scores = _scores(self._texts, output.tokens, output.log_probs, output.top_log_probs, begins=self._begins)
        self._begins = self._begins and self._texts.begin(output.tokens)
        return scores

    def _prompt_scores(self, output: Output) -> tuple[TokenScore, ...]:
        found = output.prompt_log_probs
        if found is None:
            return ()
        begins = self._texts.begin(self._prompt[:1])
        return _scores(self._texts, self._prompt[1:], found.values, found.top, begins=begins)


class Assembly:
    """Converts outputs of one prompt's `requests` to pieces. A request is a sequence, or a search of several beams.

    `prompt_thought`: for `new_reader`.
    """

    def __init__(
        self,
        requests: "Sequence[GenerationRequest]",
        stop: "Sequence[str]",
        texts: TokenTexts,
        *,
        continues: bool,
        new_reader: NewReader | None = None,
        prompt_thought: str | None = None,
        reasons: bool = False,
    ) -> None:
        self.requests = tuple(requests)
        self._reasons = reasons
        self._reused = 0
        beams = requests[0].beams
        count = len(requests) if beams is None else beams.returned
        prompt = requests[0].prompt
        readers = [None if new_reader is None else new_reader(prompt_thought) for _ in range(count)]
        self._sequences = [
            SequenceText(prompt, stop, texts, index, continues=continues, reader=reader)
            for index, reader in enumerate(readers)
        ]
        self._index_of = {request.request_id: index for index, request in enumerate(requests)}

    @property
    def finished(self) -> bool:
        """Whether the last piece has been returned."""
        return all(sequence.finished for sequence in self._sequences)

    def runs(self, request_id: str) -> bool:
        """Whether more outputs of a request are needed."""
        return not self._sequences[self._index_of[request_id]].finished

    def take(self, output: Output) -> list[Piece]:
        """The pieces of an output; none after a stop word. Raises its error."""
        if not self.runs(output.request_id):
            return []
        if output.error is not None:
            with hinted():  # a failed engine raises one error object for all requests, which would keep all tracebacks
                raise copy(output.error) from output.error.__cause__
        index = self._index_of[output.request_id]
        if index == 0:  # the others share its prompt
            self._reused = output.cached_tokens or 0
        searches = self.requests[0].beams is not None
        pieces = self._take_beams(output) if searches else [self._sequences[index].take(output)]
        if self.finished:
            pieces[-1] = replace(pieces[-1], usage=self._usage())
        return pieces

    def answer(self, pieces: "Sequence[Piece]") -> Answer:
        """The answer composed of all pieces."""
        usage = pieces[-1].usage
        assert usage is not None, "the last piece has the usage"
        of_index: dict[int, list[Piece]] = {index: [] for index in range(len(self._sequences))}
        for piece in pieces:
            of_index[piece.index].append(piece)
        completions = [
            _completion(of_index[index], sequence.cumulative_log_prob, reasons=self._reasons)
            for index, sequence in enumerate(self._sequences)
        ]
        context = [piece.context_logits for piece in pieces if piece.context_logits is not None]
        prompt_scores = tuple(score for piece in pieces for score in piece.prompt_log_probs)
        phase = None
        if self.requests[0].context_only and completions[0].finish_reason not in CUT:
            phase = self._context_phase(completions[0])
            if completions[0].finish_reason == "length" and self.requests[0].max_tokens > 1:
                completions[0] = replace(completions[0], finish_reason="not_finished")
        return Answer(tuple(completions), usage, context[0] if context else None, prompt_scores, phase)

    def _context_phase(self, made: Completion) -> bytes:
        scores = [score.log_prob for score in made.log_probs]
        tops = [tuple((each.token, each.log_prob) for each in score.top) for score in made.log_probs]
        return phase_after(self.requests[0], made.tokens, scores, tops).encode()

    def _take_beams(self, output: Output) -> list[Piece]:
        """The pieces of a beam search; fewer beams are returned if bad words and `min_tokens` leave fewer."""
        if output.finish_reason in CUT:
            return [sequence.take(output) for sequence in self._sequences]
        del self._sequences[len(output.beams) :]
        pieces = []
        for sequence, beam in zip(self._sequences, output.beams, strict=True):
            made = Output(output.request_id, tuple(beam.tokens), beam.finish_reason, log_probs=tuple(beam.log_probs))
            pieces.append(sequence.take(made))
            sequence.cumulative_log_prob = beam.cumulative_log_prob
        return pieces

    def _usage(self) -> Usage:
        prompt = len(self.requests[0].prompt)
        return Usage(prompt, sum(sequence.count for sequence in self._sequences), min(self._reused, prompt))


def _scores(
    texts: TokenTexts,
    tokens: "Sequence[int]",
    log_probs: "Sequence[float]",
    tops: "Sequence[TopLogProbs]",
    *,
    begins: bool,
) -> tuple[TokenScore, ...]:
    """Scores of tokens with their texts. `begins`: the first token is at the beginning of a text."""
    found = []
    for token, log_prob, top in zip(tokens, log_probs, tops or repeat(()), strict=False):
        others = tuple(TokenScore(other, texts.of(other, begins=begins)[0], of_other) for other, of_other in top)
        found.append(TokenScore(token, texts.of(token, begins=begins)[0], log_prob, others))
        begins = begins and texts.begin((token,))
    return tuple(found)


def _completion(pieces: "Sequence[Piece]", cumulative_log_prob: float, *, reasons: bool) -> Completion:
    reason = pieces[-1].finish_reason
    assert reason is not None, "a sequence's last piece has a finish reason"
    reasoning = "".join(piece.reasoning for piece in pieces)
    return Completion(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        reason,
        reasoning if reasons or reasoning else None,
        tuple(score for piece in pieces for score in piece.log_probs),
        cumulative_log_prob,
        _together([piece.generation_logits for piece in pieces if piece.generation_logits is not None]),
    )


def _rows(data: bytes, count: int) -> Logits | None:
    """Logits of `count` tokens."""
    if not data:
        return None
    return np.frombuffer(data, np.float32).reshape(count, -1)


def _together(rows: "Sequence[Logits]") -> Logits | None:
    if len(rows) < 2:
        return rows[0] if rows else None
    return np.concatenate(rows)
