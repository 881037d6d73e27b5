"""The interface of engines to text models, whichever process runs the engine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray
from token_texts import TopTokens


@dataclass(slots=True)
class Piece:
    """New output of one returned sequence. `beams`: new token ids of each; `outputs`: the engine's optional tensors.

    `reason`: of the end, as the engine tells it. `log_probs`: of the first beam's tokens; `top_log_probs`: the most
    likely tokens at each of them; `prompt_log_probs`: both of the prompt, without its first token. `cached_tokens` of
    the prompt, whose keys and values earlier requests had left; None: not told.
    `failure`: message and code of an error that ends the whole request.
    """

    sequence: int
    beams: list[list[int]]
    finished: bool
    outputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    failure: tuple[str, str] | None = None
    reason: str = ""
    log_probs: Sequence[float | None] = ()
    top_log_probs: Sequence[TopTokens] = ()
    prompt_log_probs: tuple[Sequence[float], Sequence[TopTokens]] | None = None
    cached_tokens: int | None = None


class PieceReceiver(Protocol):
    """Receives the pieces of one request, in order."""

    def take(self, pieces: list[Piece]) -> None:
        """Take the pieces that arrived since the last call. Must not raise."""


class TextEngine(Protocol):
    """Generates for text models."""

    def start(
        self,
        inputs: Mapping[str, NDArray[Any]],
        receiver: PieceReceiver,
        timeout: float | None,
        *,
        model_end_ids: bool,
        watched: bool,
    ) -> object:
        """Begin a request of engine tensors; returns a handle for `cancel`. Raises RequestFailed for wrong values.

        `timeout`: seconds for the whole request; `model_end_ids`: end at the model's own end ids; `watched`: pieces are
        to come as they are made though the client waits for the whole answer, because they may end it.
        """

    def together(self) -> AbstractContextManager[None]:
        """A context: requests started inside are sent to the engine together at its end."""

    def cancel(self, started: object) -> None:
        """End a request that `start` returned, unless it has ended; its receiver still gets its last piece."""

    def ping(self, answer: Callable[[tuple[str, str] | None], None]) -> None:
        """Call `answer` once the engine responds: with None, or with message and code of its error."""

    def close(self) -> None:
        """End the connection and its threads."""
