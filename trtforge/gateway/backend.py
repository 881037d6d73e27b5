"""Interface of the gateway to a server of text models, which routers, caches and batch tiers can also implement."""

from collections.abc import AsyncGenerator, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from trtforge.gateway.request import Piece, TextRequest

GUIDE_TYPE = "guided_decoding_guide_type"
"""The input for guided decoding; TensorRT-LLM before 0.19 lacks it."""
GONE = "GONE"
"""Code of a backend that is unreachable or has ended; another backend may serve the request."""


SEEDS = ("random_seed", "seed")
"""The names of the input for a seed, by release."""
ADAPTER = "lora_task_id"
"""The input that names a LoRA adapter."""


class BackendError(Exception):
    """The error for a request that a backend did not serve. `code`: a gRPC status, or GONE; None: unknown."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True)
class ServedModel:
    """A text model: the data type of each input by name, and the names of its outputs."""

    name: str
    inputs: Mapping[str, str]
    outputs: Set[str] = frozenset()

    @property
    def is_text_model(self) -> bool:
        """Whether it takes and returns text."""
        return "text_input" in self.inputs and "text_output" in self.outputs

    @property
    def takes_guides(self) -> bool:
        """Whether it has the inputs of guided decoding; it may still refuse guides."""
        return GUIDE_TYPE in self.inputs

    @property
    def takes_seeds(self) -> bool:
        """Whether it has an input for a seed."""
        return any(name in self.inputs for name in SEEDS)


class Backend(Protocol):
    """A server of text models."""

    async def models(self) -> tuple[ServedModel, ...]:
        """Its text models, the main one first. Raises BackendError."""

    async def ready(self) -> bool:
        """Whether it can serve now."""

    def generate(self, request: TextRequest) -> AsyncGenerator[Piece, None]:
        """The pieces of one request as they arrive. Closing the generator cancels the request.

        Raises BackendError.
        """

    async def close(self) -> None:
        """Close its connections."""
