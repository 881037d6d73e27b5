"""Requests to a text model and their answers, independent of HTTP and of the backend's protocol."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from trtforge.core.seeds import seed_of
from trtforge.engine_process.context_phase import RequestType
from trtforge.engine_process.requests import Guide

Prompt = str | tuple[int, ...]


class TopToken(TypedDict):
    """A likely token at one position."""

    token: str
    bytes: list[int]
    id: int
    logprob: float


class TokenScore(TypedDict):
    """A token of a prompt or an answer. `logprob` None: the first token of a prompt."""

    token: str
    bytes: list[int]
    id: int
    logprob: float | None
    top_logprobs: list[TopToken]


def scores_shown(scores: Sequence[TokenScore]) -> list[dict[str, object]]:
    """The scores of tokens in OpenAI's format."""
    return [_shown(score) | {"top_logprobs": list(map(_shown, score.get("top_logprobs") or ()))} for score in scores]


def _shown(score: TokenScore | TopToken) -> dict[str, object]:
    return {"token": score["token"], "bytes": score["bytes"], "logprob": score["logprob"]}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; None: not given. Greedy unless `top_k` or `top_p` is given, as in TensorRT-LLM."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: str | None = None
    """JSON: token id to bias."""
    priority: float | None = None
    """From 0 to 1, as in trtllm-serve: the waiting request with the highest priority runs first."""
    cache_salt: str | None = None
    """As in trtllm-serve: KV blocks are shared only among requests with the same salt."""
    min_p: float | None = None
    no_repeat_ngram_size: int | None = None
    prompt_ignore_length: int | None = None

    def seeded(self) -> "Sampling":
        """A copy with a random seed if tokens are sampled and no seed is given."""
        return replace(self, seed=seed_of(self.seed, draws=self.top_k is not None or self.top_p is not None))


@dataclass(frozen=True)
class TextRequest:
    """One prompt, or one conversation as `messages` (the JSON of the tensor of that name).

    `sequences`: number of answers. `logprobs`: scores of the answer's tokens, with `top_logprobs` alternatives each;
    `prompt_logprobs`: those of the prompt too. `adapter`: task id of a LoRA adapter of the model. `request_type`:
    phases to compute; `context_phase`: the result of the context server (`disaggregated.py`).
    """

    model: str
    max_tokens: int
    prompt: Prompt | None = None
    messages: str | None = None
    stream: bool = False
    sequences: int = 1
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    guide: Guide | None = None
    adapter: int | None = None
    request_type: RequestType = "context_and_generation"
    context_phase: bytes = b""


@dataclass(slots=True)
class Piece:
    """A response: the new part of one sequence. `finish_reason`: "stop", "length" or "cancelled" in its last piece.

    `input_tokens` of the prompt, `output_tokens` of the sequence so far, `cached_tokens` of the prompt that were in the
    KV cache; None: not reported. `context_phase`: the result of a server that computed only the context.
    `prompt_thought`: in the first piece of a sequence, the opening tag of reasoning with which the prompt of a chat
    ends, "" if it ends with none; None: not reported.
    """

    sequence: int = 0
    text: str = ""
    finish_reason: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    logprobs: Sequence[TokenScore] = field(default=())
    prompt_logprobs: Sequence[TokenScore] = field(default=())
    context_phase: bytes = b""
    prompt_thought: str | None = None
