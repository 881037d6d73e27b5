"""What a text model needs of an engine, whichever process runs it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(slots=True)
class Piece:
    """What one returned sequence got. `beams`: the new token ids of each; `outputs`: the engine's optional tensors.

    `failure`: message and code of an error that ends the whole request.
    """

    sequence: int
    beams: list[list[int]]
    finished: bool
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    failure: tuple[str, str] | None = None


class PieceReceiver(Protocol):
    """Gets the pieces of one request, in order."""

    def take(self, pieces: list[Piece]) -> None:
        """Take the pieces that came since the last call. Must not raise."""


class TextEngine(Protocol):
    """Generates for text models."""

    def start(
        self, inputs: Mapping[str, np.ndarray], receiver: PieceReceiver, timeout: float | None, *, model_end_ids: bool
    ) -> object:
        """Begin a request of engine tensors; what `cancel` takes. Raises RequestFailed for wrong values.

        `timeout`: seconds for the whole request; `model_end_ids`: end at the model's own end ids.
        """

    def together(self) -> AbstractContextManager[None]:
        """Requests that are started within reach the engine at once, at its end."""

    def cancel(self, started: object) -> None:
        """End a request that `start` returned."""

    def ping(self, answer: Callable[[tuple[str, str] | None], None]) -> None:
        """Call back when the engine has shown that it works; with message and code of the error if it does not."""

    def close(self) -> None:
        """End the connection and its threads."""
