"""A backend without a server: answers with the words of its prompt, scores every token, and keeps what it was asked."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from trtforge.gateway.backend import BackendError, ServedModel
from trtforge.gateway.request import Piece, TextRequest, TokenScore

INPUTS = {
    "text_input": "BYTES",
    "messages": "BYTES",
    "input_ids": "INT32",
    "max_tokens": "INT32",
    "stop_words": "BYTES",
    "logit_bias": "BYTES",
    "top_k": "INT32",
    "top_p": "FP32",
    "temperature": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "min_tokens": "INT32",
    "priority": "FP32",
    "cache_salt": "BYTES",
    "seed": "UINT64",
    "stream": "BOOL",
    "num_return_sequences": "INT32",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_num_cached_tokens": "BOOL",
    "return_prompt_thought": "BOOL",
    "return_logprobs": "BOOL",
    "top_logprobs": "INT32",
    "return_prompt_logprobs": "BOOL",
    "guided_decoding_guide_type": "BYTES",
    "guided_decoding_guide": "BYTES",
    "min_p": "FP32",
    "no_repeat_ngram_size": "INT32",
    "prompt_ignore_length": "INT32",
    "request_type": "BYTES",
    "context_phase_params": "UINT8",
}
OUTPUTS = (
    "text_output",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "prompt_thought",
    "logprobs",
    "prompt_logprobs",
    "context_phase_params",
)
OLD = frozenset(("text_input", "max_tokens", "stop_words", "top_p", "temperature", "stream"))
"""Inputs of a repository that was packaged earlier."""


@dataclass
class FakeBackend:
    """One model. `words` None: the prompt's own words, over and over; a token is a word with the space before it.

    `error`: raised instead of the piece of this number. `old`: reports nothing but text. `held`: no piece comes while
    it is true. `cached`: tokens of each prompt in the KV cache, for the second sequence one more, and so on. `phase`:
    what a context_only request returns; `reason`: why answers end, if not as they would. `thought`: the tag of
    reasoning with which prompts end, None: not reported.
    """

    words: tuple[str, ...] | None = None
    name: str = "ensemble"
    error: BackendError | None = None
    error_at: int = 0
    old: bool = False
    delay: float = 0.0
    held: bool = False
    cached: int | None = None
    phase: bytes = b""
    reason: str = ""
    thought: str | None = None
    requests: list[TextRequest] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    closed: bool = False
    is_ready: bool = True

    async def models(self) -> tuple[ServedModel, ...]:
        if not self.is_ready:
            raise BackendError("the model server cannot be reached", "GONE")
        inputs = {name: kind for name, kind in INPUTS.items() if not self.old or name in OLD}
        return (ServedModel(self.name, inputs, frozenset(OUTPUTS)),)

    async def ready(self) -> bool:
        return self.is_ready

    async def close(self) -> None:
        self.closed = True

    async def generate(self, request: TextRequest) -> AsyncGenerator[Piece, None]:
        self.requests.append(request)
        self.running += 1
        ended = False
        try:
            pieces = self._streamed(request) if request.stream else self._whole(request)
            for number, piece in enumerate(pieces):
                await asyncio.sleep(self.delay)
                while self.held:
                    await asyncio.sleep(0.01)
                if self.error is not None and number == self.error_at:
                    ended = True
                    raise self.error
                yield piece
            ended = True
        finally:
            self.running -= 1
            self.cancelled += not ended

    def _streamed(self, request: TextRequest) -> list[Piece]:
        tokens, reason = self._answer(request)
        pieces = []
        for sequence in range(request.sequences):
            for number, token in enumerate(tokens):
                last = number == len(tokens) - 1
                pieces.append(self._piece(request, sequence, [token], number + 1, reason if last else ""))
        return pieces

    def _whole(self, request: TextRequest) -> list[Piece]:
        tokens, reason = self._answer(request)
        return [self._piece(request, each, tokens, len(tokens), reason) for each in range(request.sequences)]

    def _piece(self, request: TextRequest, sequence: int, tokens: list[str], so_far: int, reason: str) -> Piece:
        text = "".join(tokens)
        if self.old:
            return Piece(text=text)
        return Piece(
            sequence,
            text,
            reason and (self.reason or reason),
            len(prompt_tokens(request)),
            so_far,
            None if self.cached is None else self.cached + sequence,
            logprobs=[score(token, request.top_logprobs) for token in tokens] if request.logprobs else (),
            prompt_logprobs=prompt_scores(request) if request.prompt_logprobs and so_far == len(tokens) else (),
            context_phase=self.phase if request.request_type == "context_only" else b"",
            prompt_thought=self.thought if so_far == len(tokens) else None,
        )

    def _answer(self, request: TextRequest) -> tuple[list[str], str]:
        words = list(self.words or prompt_tokens(request))
        if self.words is None:
            words = [words[number % len(words)] for number in range(min(request.max_tokens, 1000))]
        cut = words[: request.max_tokens]
        reason = "length" if self.words is None or len(words) > len(cut) else "stop"
        for number in range(len(cut)):  # a stop word is part of the answer, as in TensorRT-LLM
            if any(word in "".join(cut[: number + 1]) for word in request.stop):
                return cut[: number + 1], "stop"
        return cut, reason


def prompt_tokens(request: TextRequest) -> list[str]:
    """The tokens of a prompt."""
    if request.messages is not None:
        messages = json.loads(request.messages)
        messages = messages["messages"] if isinstance(messages, dict) else messages
        text = " ".join(message["content"] for message in messages)
    elif isinstance(request.prompt, tuple):
        return [f" {token}" for token in request.prompt]
    else:
        text = request.prompt or ""
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


def score(token: str, top: int) -> TokenScore:
    """A token's score: each alternative is one less likely than the last."""
    likely = [
        {"token": text, "bytes": list(text.encode()), "id": number, "logprob": -0.5 - number}
        for number, text in enumerate((token, *(f"~{each}" for each in range(top - 1)))[:top])
    ]
    return {"token": token, "bytes": list(token.encode()), "id": 1, "logprob": -0.5, "top_logprobs": likely}  # type: ignore[typeddict-item]


def prompt_scores(request: TextRequest) -> list[TokenScore]:
    """The scores of a prompt's tokens."""
    scores = [score(token, request.top_logprobs) for token in prompt_tokens(request)]
    return [{**scores[0], "logprob": None, "top_logprobs": []}, *scores[1:]]
