"""What a client asks of the engine and what it gets back. Needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from trtforge.core.errors import ForgeError


class ErrorCode(str, Enum):
    """The gRPC status that a failed request ends with; the first word of the error's text."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True)
class RequestFailure:
    """Why a request got no answer, or not all of it."""

    code: ErrorCode
    message: str


FinishReason = Literal["end_id", "stop_word", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen: without top_k and top_p, with top_k 1 or temperature 0 the most likely one.

    Names, order and defaults follow TensorRT-LLM (cpp/tensorrt_llm/kernels/penaltyKernels.cu and samplingTopKKernels):
    bias, temperature, penalties over prompt and output, then top_k, then top_p of what top_k left.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    return_log_probs: bool = False
    embedding_bias: Sequence[float] = ()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        if self.top_k == 1 or self.temperature == 0.0:
            return True
        return not self.top_k and not self.top_p

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on how often it occurred."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether the token is the most likely one of the model's own logits, and nothing else is asked for."""
        changed = self.penalises or self.min_tokens > 0 or len(self.embedding_bias) > 0
        return self.greedy and not changed and not self.return_log_probs


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and when to stop. An end id is not part of the output; a matched stop word is."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    end_ids: frozenset[int] = frozenset()
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens that one step gave a request; the last one of a request carries `finish_reason`.

    `allocated_blocks`: KV blocks that the request was given so far, the `reused_blocks` among them.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: ForgeError | None = None
    log_probs: tuple[float, ...] = ()
    cumulative_log_prob: float = 0.0
    reused_blocks: int = 0
    allocated_blocks: int = 0


class RequestEngine(Protocol):
    """What generates. All methods may be called from any thread and return at once, but `close`."""

    @property
    def max_running(self) -> int:
        """Sequences that run at once; more wait."""

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes that compute for the engine."""

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> None:
        """Start a request. Outputs come on the engine's thread; the last one has a finish_reason."""

    def cancel(self, request_id: str, *, only_waiting: bool = False) -> None:
        """End a request as it stands; one that is over is no error. `only_waiting`: not if it has begun to run."""

    def ping(self, on_turn: Callable[[], None]) -> None:
        """Call back from the engine's thread when its loop turns next."""

    def after_steps(self, on_step: Callable[[], None]) -> None:
        """Call back, from the engine's thread, after the outputs of each step."""

    def figures(self) -> dict[str, float]:
        """Counters and gauges of this moment by name; those of EngineStatistics where the engine has them."""

    def check(self) -> None:
        """Raises ForgeError if a process that computes for the engine has ended."""

    def close(self) -> None:
        """End the engine and its processes."""
