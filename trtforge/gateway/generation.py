"""The answers to one API request: its prompts run concurrently, each with the requested number of sequences."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from trtforge.gateway.backend import Backend, BackendError
from trtforge.gateway.request import Piece, TextRequest, TokenScore
from trtforge.gateway.sequence import CANCELLED, AnswerSequence, Delta, NewAnswerReader


@dataclass(frozen=True)
class Usage:
    """Exact numbers of tokens. `cached_tokens`: tokens of the prompts that were in the KV cache; None: not reported."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(slots=True)
class Choice:
    """One whole answer. `parts`: pairs of reasoning and the text after it; `stop_word`: see Delta."""

    parts: list[tuple[str, str]]
    finish_reason: str
    logprobs: list[TokenScore] = field(default_factory=list)
    stop_word: str = ""

    @property
    def reasoning(self) -> str:
        """The whole reasoning."""
        return "".join(reasoning for reasoning, _ in self.parts)

    @property
    def text(self) -> str:
        """The whole text without reasoning."""
        return "".join(text for _, text in self.parts)


class Generation:
    """One prompt and its sequences. `first`: index of its first choice; `new_reader`: creates the readers of its
    answers; `nothing_new`: no generated token is used."""

    def __init__(
        self,
        backend: Backend,
        request: TextRequest,
        first: int = 0,
        new_reader: NewAnswerReader | None = None,
        *,
        nothing_new: bool = False,
    ) -> None:
        self._backend = backend
        self._request = request
        self._sequences = [AnswerSequence(request, first + number, new_reader) for number in range(request.sequences)]
        self._nothing_new = nothing_new
        self._input_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._overrun = False
        self.prompt_logprobs: Sequence[TokenScore] = ()

    @property
    def usage(self) -> Usage | None:
        """Tokens so far; None if the server does not count."""
        counts = [sequence.output_tokens for sequence in self._sequences]
        if self._input_tokens is None or all(count is None for count in counts):
            return None
        output_tokens = 0 if self._nothing_new else sum(count or 0 for count in counts)
        return Usage(self._input_tokens, output_tokens, self._cached_tokens)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas of all sequences. Closing it cancels the request. Raises BackendError."""
        async with aclosing(self._backend.generate(self._request)) as pieces:
            async for piece in pieces:
                for delta in self._take(piece):
                    yield delta
                if self._overrun and all(sequence.finished for sequence in self._sequences):
                    break  # the gateway found a stop word that the server did not
        for sequence in self._sequences:
            for delta in sequence.end():
                yield delta

    def _take(self, piece: Piece) -> list[Delta]:
        require_not_cancelled(piece)
        if piece.input_tokens is not None:
            self._input_tokens = piece.input_tokens
        if piece.cached_tokens is not None:
            # Later sequences may have reused KV blocks of the first one.
            found = (piece.cached_tokens, self._cached_tokens)
            self._cached_tokens = min(count for count in found if count is not None)
        if piece.prompt_logprobs:
            self.prompt_logprobs = piece.prompt_logprobs
        if not 0 <= piece.sequence < len(self._sequences):
            raise BackendError(f"the server answered with sequence {piece.sequence}", "INTERNAL")
        sequence = self._sequences[piece.sequence]
        self._overrun = self._overrun or (sequence.finished and bool(piece.text))
        return sequence.take(piece)


class Generations:
    """All prompts of one API request. `new_reader`, `nothing_new`: of all answers."""

    def __init__(
        self,
        backend: Backend,
        requests: Sequence[TextRequest],
        new_reader: NewAnswerReader | None = None,
        *,
        nothing_new: bool = False,
    ) -> None:
        self.parts: list[Generation] = []
        first = 0
        for request in requests:
            self.parts.append(Generation(backend, request, first, new_reader, nothing_new=nothing_new))
            first += request.sequences
        self.choices = first

    @property
    def usage(self) -> Usage | None:
        """Tokens of all prompts; None if a server does not count."""
        found = [part.usage for part in self.parts]
        counted = [usage for usage in found if usage is not None]
        if len(counted) < len(found):
            return None
        cached = [usage.cached_tokens for usage in counted if usage.cached_tokens is not None]
        return Usage(
            sum(usage.prompt_tokens for usage in counted),
            sum(usage.completion_tokens for usage in counted),
            sum(cached) if cached else None,
        )

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas of all choices as they arrive. Closing it cancels all requests. Raises BackendError."""
        if len(self.parts) == 1:
            async with aclosing(self.parts[0].deltas()) as deltas:
                async for delta in deltas:
                    yield delta
            return
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_forward(part, queue)) for part in self.parts]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> list[Choice]:
        """All choices, complete. Raises BackendError."""
        choices = [Choice([], "stop") for _ in range(self.choices)]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                choices[delta.index].parts.append((delta.reasoning, delta.text))
                choices[delta.index].logprobs.extend(delta.logprobs)
                choices[delta.index].finish_reason = delta.finish_reason or "stop"
                choices[delta.index].stop_word = delta.stop_word
        return choices


def require_not_cancelled(piece: Piece) -> None:
    """Raises BackendError for the last piece of a request that somebody else cancelled."""
    if piece.finish_reason == CANCELLED:
        raise BackendError("the server cancelled the request", "CANCELLED")


async def _forward(part: Generation, queue: "asyncio.Queue[Delta | BaseException | None]") -> None:
    try:
        async with aclosing(part.deltas()) as deltas:
            async for delta in deltas:
                queue.put_nowait(delta)
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
