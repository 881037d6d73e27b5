"""An engine process whose tokens a second, smaller engine process drafts: both are embedded engines of one repository.

Each step asks the draft engine for some tokens and the target to verify them, as `drafted_engine` does with TensorRT
engines: what `_spec_generate` of tensorrtllm_backend's tensorrt_llm_bls does (lib/decode.py). It streams a step at a
time, and goes on without drafts where the draft engine fails or a prompt gets too long for a further step.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from input_values import first_integer
from model_config import ModelConfig
from numpy.typing import NDArray
from responder import RequestFailed
from served_engine import ServedEngine
from text_engine import Piece, PieceReceiver

from trtforge.engine_process.client import EngineClient, Submitted
from trtforge.engine_process.ended_requests import Counted
from trtforge.engine_process.messages import Update
from trtforge.engine_process.rendezvous import socket_path
from trtforge.engine_process.requests import UINT64_MAX, DraftTokens, GenerationRequest, SamplingParams

_COUNT, _LOGITS = "num_draft_tokens", "use_draft_logits"
_OF_ONE_REQUEST = ("return_kv_cache_reuse_stats", "return_perf_metrics")
"""What these ask for is of one request to the engine, not of several: such requests get no drafts."""
_IMPOSSIBLE = np.float32(-1e9)


class DraftedServedEngine(ServedEngine):
    """A TextEngine with a draft engine, whose model `tensorrt_llm_draft_model_name` names."""

    def __init__(self, config: ModelConfig, names: Mapping[str, str]) -> None:
        super().__init__(config, names)
        path = socket_path(config.text("tensorrt_llm_draft_model_name"), os.getppid())
        self._drafter = EngineClient(path, config.name, os.getpid())
        self._most_drafts = config.integer(_COUNT, 0)
        self._longest = config.integer("max_input_len", 0)

    def start(
        self,
        inputs: Mapping[str, NDArray[Any]],
        receiver: PieceReceiver,
        timeout: float | None,
        *,
        model_end_ids: bool,
        watched: bool,
    ) -> Any:
        """See TextEngine."""
        count = first_integer(inputs, _COUNT, self._most_drafts)
        with_logits = bool(first_integer(inputs, _LOGITS, 0))
        inputs = {name: value for name, value in inputs.items() if name not in (_COUNT, _LOGITS)}
        if not 0 <= count <= self._most_drafts:
            raise RequestFailed(f"{_COUNT} {count}: the engine verifies 0 to {self._most_drafts} draft tokens")
        sequences = self._requested(inputs, model_end_ids=model_end_ids)
        asked = any(bool(inputs[name].any()) for name in _OF_ONE_REQUEST if name in inputs)
        if not count or asked or len(sequences) > 1 or not _may_be_drafted(sequences[0].request):
            return self._submitted(sequences, inputs, receiver, timeout)
        ends_at = None if timeout is None else time.monotonic() + timeout
        steps = Steps(
            sequences[0].request, receiver, self._drafter, self._client, count, self._longest, with_logits, ends_at
        )
        steps.begin()
        return steps

    def cancel(self, started: object) -> None:
        """See TextEngine."""
        if isinstance(started, Steps):
            started.cancel()
        else:
            super().cancel(started)

    def close(self) -> None:
        """See TextEngine."""
        super().close()
        self._drafter.close()


@dataclass(eq=False)
class Steps:
    """A request that is generated in steps. `count`: draft tokens of a step; `longest`: prompt that the target takes.

    `ends_at`: when its timeout has passed, in seconds of `time.monotonic`. The clients' threads and that of the text
    model enter it, never two at once. The target's metrics count it as one request.
    """

    request: GenerationRequest
    receiver: PieceReceiver
    drafter: EngineClient
    target: EngineClient
    count: int
    longest: int
    with_logits: bool
    ends_at: float | None = None
    _begun_at: float = field(default_factory=time.monotonic)
    _made: list[int] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)
    _running: tuple[EngineClient, Submitted] | None = None
    _cancelled: bool = False
    _ended: bool = False

    def begin(self) -> None:
        """Begin the next step, or what is left without drafts."""
        with self._lock:
            count = min(self.count, self._left - 1)
            if self._cancelled:
                self._end("cancelled")
            elif len(self.request.prompt) + len(self._made) + self.count + 1 > self.longest:
                self._submit(self.target, self._part(self._left), self._take_rest)
            elif count < 1:
                self._verify(None)
            else:
                self._submit(self.drafter, self._draft_request(count), _Draft(self).take)

    def cancel(self) -> None:
        """End the request; its last piece still comes."""
        with self._lock:
            self._cancelled = True
            if self._running is not None:
                self._running[0].cancel(self._running[1])

    def drafted(self, tokens: list[int], logits: bytes) -> None:
        """Have the target verify these; it goes on alone if there are none."""
        with self._lock:
            if self._cancelled:
                self._end("cancelled")
            elif not tokens:
                self._submit(self.target, self._part(self._left), self._take_rest)
            else:
                own = _adjusted(logits, len(tokens), self.request.sampling) if logits else b""
                self._verify(DraftTokens(tuple(tokens), own, alone=True))

    @property
    def _left(self) -> int:
        return self.request.max_tokens - len(self._made)

    def _part(self, count: int, **changes: Any) -> GenerationRequest:
        """A request for `count` tokens after those that were made. Each step draws other random numbers."""
        sampling = self.request.sampling
        sampling = replace(
            sampling,
            min_tokens=max(0, sampling.min_tokens - len(self._made)),
            seed=((sampling.seed or 0) + len(self._made)) & UINT64_MAX,
        )
        prompt = (*self.request.prompt, *self._made)
        return replace(self.request, prompt=prompt, max_tokens=count, sampling=sampling, **changes)

    def _draft_request(self, count: int) -> GenerationRequest:
        """No end id and no stop word ends a draft; it has no adapter."""
        logits = self.with_logits and _has_own_distribution(self.request.sampling)
        made = self._part(count, end_ids=frozenset(), stop_words=(), lora_task_id=None, generation_logits=logits)
        return replace(made, sampling=replace(made.sampling, min_tokens=0), streamed=False)

    def _verify(self, drafts: DraftTokens | None) -> None:
        count = self._left if drafts is not None else 1
        self._submit(self.target, self._part(count, drafts=drafts), self._take_verified)

    def _submit(
        self, client: EngineClient, request: GenerationRequest, take: Callable[[list[tuple[int, Update]]], None]
    ) -> None:
        timeout = None if self.ends_at is None else max(0.001, self.ends_at - time.monotonic())
        counted: Counted = "failures" if client is self.target else "nothing"
        submitted = client.submit((request,), _Taking(take), timeout, counted)
        if not self._ended:
            self._running = client, submitted

    def _take_verified(self, updates: list[tuple[int, Update]]) -> None:
        self._take(updates, rest=False)

    def _take_rest(self, updates: list[tuple[int, Update]]) -> None:
        self._take(updates, rest=True)

    def _take(self, updates: list[tuple[int, Update]], *, rest: bool) -> None:
        """Hand out what the target made. `rest`: no step comes after this one, however many tokens are left."""
        with self._lock:
            for _, update in updates:
                if self._ended:
                    return
                ended = self._add(update.tokens, update.cached_tokens)
                if update.failure is not None:
                    self._fail(update)
                elif ended:
                    self._end("stop_word")
                elif update.finish_reason == "length" and self._left > 0 and not rest:
                    self.begin()
                elif update.finish_reason is not None:
                    self._end(update.finish_reason)

    def _add(self, tokens: list[int], cached: int | None) -> bool:
        """Hand new tokens out; whether a stop word that began in an earlier step ends with one of them.

        `cached`: tokens of the prompt that were in the cache, which is of interest in the first step alone.
        """
        words = [word for word in self.request.stop_words if len(word) > 1]
        new: list[int] = []
        ended = False
        for token in tokens:
            self._made.append(token)
            new.append(token)
            ended = any(tuple(self._made[-len(word) :]) == word for word in words)
            if ended:
                break
        if new:
            self.receiver.take([Piece(0, [new], False, cached_tokens=cached)])
        return ended

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            if self._running is not None:
                self._running[0].cancel(self._running[1])
            if reason != "cancelled":
                self.target.count_answered(time.monotonic() - self._begun_at)
            self.receiver.take([Piece(0, [[]], True, reason=reason)])

    def _fail(self, update: Update) -> None:
        assert update.failure is not None
        self._ended = True
        self.receiver.take([Piece(0, [], True, failure=(update.failure.message, update.failure.code.value))])


class _Taking:
    """A receiver of one submission's updates."""

    def __init__(self, take: Callable[[list[tuple[int, Update]]], None]) -> None:
        self.take = take


class _Draft:
    """Gathers the tokens of a draft and their logits."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._whole = Update()

    def take(self, updates: list[tuple[int, Update]]) -> None:
        """See Receiver."""
        for _, update in updates:
            self._whole.merge(update)
        if self._whole.finish_reason is not None:
            whole = self._whole if self._whole.failure is None else Update()
            self._steps.drafted(whole.tokens, bytes(whole.generation_logits))


def _may_be_drafted(request: GenerationRequest) -> bool:
    """Whether parts of the answer make the whole one."""
    sampling = request.sampling
    whole = request.context_logits or request.generation_logits or bool(request.bad_words)
    scored = sampling.return_log_probs or sampling.prompt_log_probs
    other = request.guide is not None or request.beams is not None or request.sent_adapter is not None
    other = other or request.context_only or request.context_phase is not None
    return not (whole or scored or other or sampling.top_p_decay != 1.0)


def _has_own_distribution(sampling: SamplingParams) -> bool:
    """Whether what a draft token was drawn from follows from its logits and temperature, top_k and top_p."""
    return not sampling.greedy and not sampling.remembers


def _adjusted(logits: bytes, count: int, sampling: SamplingParams) -> bytes:
    """Logits (count, vocabulary) whose softmax the draft tokens were drawn from: after temperature, top_k and top_p."""
    found = np.frombuffer(logits, dtype=np.float32).reshape(count, -1) / np.float32(sampling.temperature or 1.0)
    order = np.argsort(-found, axis=1, kind="stable")
    ranked = np.take_along_axis(found, order, axis=1).astype(np.float64)
    kept = np.ones(ranked.shape, dtype=bool)
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    shares = np.where(kept, np.exp(ranked - ranked[:, :1]), 0.0)
    shares /= shares.sum(axis=1, keepdims=True)
    if sampling.top_p:
        kept &= shares.cumsum(axis=1) - shares < sampling.top_p
    made = np.full(found.shape, _IMPOSSIBLE, dtype=np.float32)
    np.put_along_axis(made, order, np.where(kept, ranked, _IMPOSSIBLE).astype(np.float32), axis=1)
    return made.tobytes()


def connected_process(config: ModelConfig, names: Mapping[str, str]) -> ServedEngine:
    """The engine of a text model: with a draft engine if its parameters name one."""
    return (DraftedServedEngine if config.text("tensorrt_llm_draft_model_name") else ServedEngine)(config, names)
