"""Answers of the Python API: text, tokens, scores and counts, whole and in pieces."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trtforge.api.hints import hinted
from trtforge.core.detokenizer import Detokenizer
from trtforge.core.stop_text import StopText
from trtforge.core.token_texts import TokenTexts
from trtforge.engine_process.requests import FinishReason, GenerationRequest, Output

if TYPE_CHECKING:
    from collections.abc import Sequence

EndReason = Literal["stop", "length", "cancelled"]
"""`stop`: the model ended, or a stop word came; `length`: max_tokens, or the engine's max_seq_len."""
_REASONS: dict[FinishReason, EndReason] = {
    "end_id": "stop",
    "stop_word": "stop",
    "length": "length",
    "cancelled": "cancelled",
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
    """Numbers of tokens. `reused_tokens`: of the prompt, whose keys and values earlier requests had left."""

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int

    @property
    def total_tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Piece:
    """New text and tokens of an answer; the last piece has a finish reason and the usage."""

    text: str
    tokens: tuple[int, ...] = ()
    log_probs: tuple[TokenScore, ...] = ()
    finish_reason: EndReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Answer:
    """A whole answer. `tokens` may go on after a stop word, which `text` ends before."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: EndReason
    usage: Usage
    log_probs: tuple[TokenScore, ...] = ()

    @property
    def cumulative_log_prob(self) -> float:
        """Sum of the tokens' log probabilities."""
        return sum(score.log_prob for score in self.log_probs)


class Assembly:
    """Outputs of one `request` in, pieces out.

    `continues`: the answer's text goes on after the prompt's; that of chat messages is a text of its own.
    """

    def __init__(
        self,
        request: GenerationRequest,
        stop: "Sequence[str]",
        texts: TokenTexts,
        block_tokens: int,
        *,
        continues: bool,
    ) -> None:
        self.request = request
        self._texts = texts
        self._block_tokens = block_tokens
        self._text = Detokenizer(texts.tokenizer, request.prompt if continues else ())
        self._begins = not continues
        self._stop = StopText(stop)
        self._count = 0
        self.finished = False

    @property
    def stopped(self) -> bool:
        """Whether a stop word has come."""
        return self._stop.found

    def take(self, output: Output) -> Piece:
        """The piece of an output. Raises its error."""
        if output.error is not None:
            with hinted():
                raise output.error
        self._count += len(output.tokens)
        text = self._stop.push(self._text.push(output.tokens))
        if output.finish_reason is not None:
            text += self._stop.push(self._text.flush()) + self._stop.flush()
        reason = "stop" if self._stop.found else _REASONS.get(output.finish_reason) if output.finish_reason else None
        self.finished = reason is not None
        return Piece(text, output.tokens, self._scores(output), reason, self._usage(output) if reason else None)

    def _scores(self, output: Output) -> tuple[TokenScore, ...]:
        tops = output.top_log_probs or ((),) * len(output.log_probs)
        found = []
        for token, log_prob, top in zip(output.tokens, output.log_probs, tops, strict=False):
            found.append(self._score(token, log_prob, tuple(self._score(*each) for each in top)))
            self._begins = self._begins and self._texts.begin((token,))
        return tuple(found)

    def _score(self, token: int, log_prob: float, top: tuple[TokenScore, ...] = ()) -> TokenScore:
        text, _ = self._texts.of(token, begins=self._begins)
        return TokenScore(token, text, log_prob, top)

    def _usage(self, output: Output) -> Usage:
        reused = min(output.reused_blocks * self._block_tokens, len(self.request.prompt))
        return Usage(len(self.request.prompt), self._count, reused)


def joined(pieces: "Sequence[Piece]") -> Answer:
    """The answer that pieces make; the last one has the finish reason."""
    last = pieces[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    return Answer(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        last.finish_reason,
        last.usage,
        tuple(score for piece in pieces for score in piece.log_probs),
    )
