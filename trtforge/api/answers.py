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
"""`stop`: the model ended, or a stop word came; `length`: max_tokens, or the engine's max_seq_len; `timed_out`: its
`allotted_time_ms` passed; `not_finished`: another engine is to go on (`context_only`)."""
_REASONS: dict[FinishReason, EndReason] = {
    "end_id": "stop",
    "stop_word": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "timed_out": "timed_out",
}


@dataclass(frozen=True)
class TokenScore:
    """A token, its text and the natural logarithm of its probability; `top`: the most likely ones in its place."""

    token: int
    text: str
    log_prob: float
    top: "tuple[TokenScore, ...]" = ()


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens. `reused_tokens`: of the prompt, whose keys and values earlier requests had left.

    `completion_tokens`: of all sequences or beams that are returned.
    """

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int

    @property
    def total_tokens(self) -> int:
        """Of prompt and completions."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Piece:
    """New text and tokens of the sequence `index` of an answer, whose last piece has a finish reason.

    The last piece of all has the usage. `context_logits` and `prompt_log_probs` come once, with the first sequence's
    first token. `reasoning`: what is new of it, before the text, with a `reasoning_parser` and of answers in Harmony.
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
    """One sequence or beam of an answer. `tokens` may go on after a stop word, which `text` ends before.

    `reasoning`: what the model wrote before its answer, "" if nothing; without `reasoning_parser` it is None, unless a
    chat's answer is in Harmony, gpt-oss's form, and has some.
    `cumulative_log_prob`: of `log_probs`; of a beam it is always known and includes the end id's.
    `generation_logits`: (tokens, vocabulary), from which each token was chosen, before anything that sampling does.
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
    """A whole answer: one completion, `n` sequences in the order of their seeds, or beams, the best first.

    `text`, `tokens` and so on are the first completion's. `context_logits`: (tokens of the prompt, vocabulary), whose
    row i predicts what follows token i. `prompt_log_probs`: of the prompt's tokens but the first. `context_phase`: of
    a `context_only` request, for the engine that goes on; None if it was cancelled or timed out.
    """

    completions: tuple[Completion, ...]
    usage: Usage
    context_logits: Logits | None = field(default=None, repr=False, compare=False)
    prompt_log_probs: tuple[TokenScore, ...] = ()
    context_phase: bytes | None = None

    @property
    def text(self) -> str:
        """Of the first completion, as the following."""
        return self.completions[0].text

    @property
    def reasoning(self) -> str | None:
        """What came before the text, see `Completion`."""
        return self.completions[0].reasoning

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids."""
        return self.completions[0].tokens

    @property
    def finish_reason(self) -> EndReason:
        """Why it ends."""
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
    """Tokens of one sequence or beam in, text and scores out.

    `continues`: the text goes on after the prompt's; that of an answer to chat messages is a text of its own.
    `reader`: of the reasoning before the text.
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
        """Whether a stop word has come."""
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
    """Outputs of one prompt's `requests` in, pieces out. Each request is a sequence, a beam search several."""

    def __init__(
        self,
        requests: "Sequence[GenerationRequest]",
        stop: "Sequence[str]",
        texts: TokenTexts,
        *,
        continues: bool,
        new_reader: NewReader | None = None,
        reasons: bool = False,
    ) -> None:
        self.requests = tuple(requests)
        self._reasons = reasons
        self._reused = 0
        beams = requests[0].beams
        count = len(requests) if beams is None else beams.returned
        self._sequences = [
            SequenceText(
                requests[0].prompt, stop, texts, index, continues=continues, reader=new_reader and new_reader()
            )
            for index in range(count)
        ]
        self._index_of = {request.request_id: index for index, request in enumerate(requests)}

    @property
    def finished(self) -> bool:
        """Whether the last piece has come."""
        return all(sequence.finished for sequence in self._sequences)

    def runs(self, request_id: str) -> bool:
        """Whether more of a request is wanted."""
        return not self._sequences[self._index_of[request_id]].finished

    def take(self, output: Output) -> list[Piece]:
        """The pieces of an output; none after a stop word. Raises its error."""
        if not self.runs(output.request_id):
            return []
        if output.error is not None:
            with hinted():  # a failed engine has one error for all requests, which would keep all tracebacks
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
        """The answer that all pieces make."""
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
        """Where bad words and `min_tokens` leave fewer beams, fewer are returned."""
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
    """Scores of tokens with their texts. `begins`: as a text begins with the first of them."""
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
