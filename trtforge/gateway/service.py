"""The endpoints: from a request's JSON to its answer, with any backend."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from trtforge.core.api_keys import ApiKeys
from trtforge.core.held_bytes import HeldBytes
from trtforge.core.host_check import HostCheck
from trtforge.core.reasoning import ReasoningParser
from trtforge.gateway.answers import Answer, ChatAnswer, CompletionAnswer
from trtforge.gateway.backend import BackendError
from trtforge.gateway.chat import ChatCall, read_chat
from trtforge.gateway.completions import CompletionCall, read_completion
from trtforge.gateway.errors import ApiError, AskedBy, of_backend, too_busy, unknown_model
from trtforge.gateway.exchange import ClientGone, Exchange
from trtforge.gateway.fields import count_values, read_body
from trtforge.gateway.generation import Generations
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.metrics import Endpoint, Metrics
from trtforge.gateway.request import TextRequest
from trtforge.gateway.response_answer import ResponseAnswer
from trtforge.gateway.response_object import ResponseObject
from trtforge.gateway.responses import ResponseCall, read_response
from trtforge.gateway.router import Choice, Router
from trtforge.gateway.thought_calls import with_calls

_LOG = logging.getLogger(__name__)
_LARGE = 128 << 10  # bytes of a body, which take some milliseconds to read
_VALUE_BYTES = 32  # of memory that a value of a body takes, such as a token id
Call = TypeVar("Call")
_CLIENT_LEFT = 499
"""The status that proxies log for a client that closed the connection."""


class Service:
    """The gateway's endpoints. `keys` None: no key is required; `hosts` None: every Host and Origin is accepted.

    `reasoning`: the parser that separates reasoning from text in answers of chats and responses.
    """

    def __init__(
        self,
        router: Router,
        keys: ApiKeys | None = None,
        limits: GatewayLimits | None = None,
        hosts: HostCheck | None = None,
        reasoning: ReasoningParser | None = None,
    ) -> None:
        self.router = router
        self.metrics = Metrics()
        self.limits = limits or GatewayLimits()
        self._keys = keys
        self._hosts = hosts
        self._reasoning = reasoning
        self._running = 0
        held, retry = self.limits.held_bytes, self.limits.retry_seconds
        self._held = HeldBytes(held, lambda: too_busy(f"bodies of {held} bytes are in flight", retry))
        self._reader = ThreadPoolExecutor(1, "reader")
        self._created = int(time.time())

    async def chat(self, exchange: Exchange) -> None:
        """/v1/chat/completions."""
        await self._answer("chat", exchange, read_chat, self._chat)

    async def completion(self, exchange: Exchange) -> None:
        """/v1/completions."""
        await self._answer("completions", exchange, read_completion, self._completion)

    async def response(self, exchange: Exchange) -> None:
        """/v1/responses."""
        await self._answer("responses", exchange, read_response, self._response)

    def authorise(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ApiError: 403 for a Host or Origin that is not allowed, 401 without a valid key if one is required."""
        self.require_host(headers)
        reason = None if self._keys is None else self._keys.why_refused(headers)
        if reason is not None:
            raise ApiError(
                HTTPStatus.UNAUTHORIZED, reason, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )

    def require_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ApiError (403) for a Host or Origin that is not allowed."""
        reason = None if self._hosts is None else self._hosts.why_refused(headers)
        if reason is not None:
            raise ApiError(HTTPStatus.FORBIDDEN, reason, code="host_not_allowed")

    async def models(self) -> list[Mapping[str, object]]:
        """The entries of /v1/models. Raises ApiError."""
        try:
            names = await self.router.names()
        except BackendError as error:
            raise of_backend(error) from None
        return [self._entry(name) for name in names]

    async def model(self, name: str) -> Mapping[str, object]:
        """One entry of /v1/models, by either of its names. Raises ApiError."""
        return self._entry((await self._named(name)).name)

    async def _answer(
        self,
        endpoint: Endpoint,
        exchange: Exchange,
        read: Callable[[Mapping[str, Any], GatewayLimits], Call],
        act: Callable[[Exchange, Call, float], Coroutine[Any, Any, None]],
    ) -> None:
        """Run an endpoint within the limits, convert failures to OpenAI's errors, and count requests."""
        start = time.perf_counter()
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        self.metrics.running.inc()
        self._running += 1
        try:
            self.authorise(exchange.headers)
            exchange.require_bounded()
            if self._running > self.limits.requests:
                raise too_busy(f"{self.limits.requests} requests are running", self.limits.retry_seconds)
            with self._held.request() as hold:
                call = await self._read(await exchange.body(hold), hold, read)
                await exchange.unless_gone(act(exchange, call, start))
            status = exchange.status
        except ClientGone:
            status = _CLIENT_LEFT
        except ApiError as error:
            status = await _send_error(exchange, error)
        except BackendError as error:
            status = await _send_error(exchange, of_backend(error))
        except Exception as error:
            status = await _send_error(exchange, _of_bug(error))
        finally:
            self._running -= 1
            self.metrics.running.dec()
            self.metrics.requests.labels(endpoint, str(status)).inc()
            self.metrics.seconds.labels(endpoint).observe(time.perf_counter() - start)

    async def _read(
        self, body: bytes, hold: Callable[[int], None], read: Callable[[Mapping[str, Any], GatewayLimits], Call]
    ) -> Call:
        """The call in a body. A thread reads large ones, one at a time, while other requests continue.

        Raises ApiError for a wrong body, and if those in flight have too many values.
        """

        def made() -> tuple[Call, int]:
            values = read_body(body, self.limits)
            return read(values, self.limits), count_values(values)

        if len(body) <= _LARGE:
            call, count = made()
        else:
            call, count = await asyncio.get_running_loop().run_in_executor(self._reader, made)
        hold(count * _VALUE_BYTES)
        return call

    async def _chat(self, exchange: Exchange, call: ChatCall, start: float) -> None:
        chosen, generations = await self._begun(call)
        usage, logprobs = call.delivery.usage, call.request.logprobs
        answer = ChatAnswer(chosen.name, with_usage=usage, logprobs=logprobs, use=call.structure.use)
        asked = AskedBy("messages", call.structure.field)
        await self._send(exchange, "chat", generations, answer, start, asked, stream=call.delivery.stream)

    async def _response(self, exchange: Exchange, call: ResponseCall, start: float) -> None:
        chosen, generations = await self._begun(call.chat)
        answer = ResponseAnswer(ResponseObject(chosen.name, call.shown), call.chat.structure.use)
        asked = AskedBy("input", call.chat.structure.field)
        await self._send(exchange, "responses", generations, answer, start, asked, stream=call.chat.delivery.stream)

    async def _begun(self, call: ChatCall) -> tuple[Choice, Generations]:
        """The model of a call and its answers, which are not generated yet. Raises ApiError."""
        chosen = await self._named(call.name)
        if call.request.guide is not None and not chosen.model.takes_guides:
            raise call.structure.unguided()
        new_reader = with_calls(
            call.new_reader(self._reasoning),
            call.structure.use,
            continues=bool(call.continued),
            asked=call.request.messages or "",
        )
        return chosen, Generations(self.router, (_final(call.request, chosen),), new_reader)

    async def _completion(self, exchange: Exchange, call: CompletionCall, start: float) -> None:
        chosen = await self._named(call.name)
        requests = tuple(_final(request, chosen) for request in call.requests)
        generations = Generations(self.router, requests, nothing_new=call.nothing_new)
        answer = CompletionAnswer(
            chosen.name,
            with_usage=call.delivery.usage,
            logprobs=call.logprobs,
            echo=call.echo,
            nothing_new=call.nothing_new,
        )
        before = _Prompts(call, generations, answer).set
        asked, stream = AskedBy("prompt"), call.delivery.stream
        await self._send(exchange, "completions", generations, answer, start, asked, stream=stream, before=before)

    async def _send(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        generations: Generations,
        answer: Answer,
        start: float,
        asked: AskedBy,
        *,
        stream: bool,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """Send an answer, streamed or whole. `before`: called with the index of a choice before it is written.

        Raises ApiError for errors of the backend; `asked`: the request's field names for them.
        """
        try:
            if stream:
                await self._stream(exchange, endpoint, generations, answer, start, before)
                return
            try:
                choices = await generations.whole()
            finally:
                self._count(generations)
        except BackendError as error:
            raise of_backend(error, asked) from None
        if before is not None:
            for index in range(len(choices)):
                before(index)
        await exchange.whole(HTTPStatus.OK, answer.whole(choices, generations.usage))

    async def _stream(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        generations: Generations,
        answer: Answer,
        start: float,
        before: Callable[[int], None] | None,
    ) -> None:
        """Send events; the response begins with the first event, so that an earlier error has its own status."""
        try:
            async with aclosing(generations.deltas()) as deltas:
                async for delta in deltas:
                    if before is not None:
                        before(delta.index)
                    events = answer.events(delta)
                    if not exchange.status:
                        self.metrics.first_seconds.labels(endpoint).observe(time.perf_counter() - start)
                        await exchange.begin_events(answer.failure)
                    if events:
                        await exchange.events(events)
        finally:
            self._count(generations)
        if not exchange.status:
            raise BackendError("the server ended the request without an answer", "INTERNAL")
        await exchange.events(answer.end(generations.usage), more=False)

    async def _named(self, name: str) -> Choice:
        """The model and adapter that a request names. Raises ApiError."""
        try:
            return await self.router.named(name)
        except BackendError as error:
            raise unknown_model(name) if error.code == "NOT_FOUND" else of_backend(error) from None

    def _entry(self, name: str) -> Mapping[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "trtforge"}

    def _count(self, generations: Generations) -> None:
        """Count the tokens of prompts that have begun to be answered, also if their answers end early."""
        for usage in (part.usage for part in generations.parts):
            if usage is None:
                continue
            self.metrics.prompt_tokens.inc(usage.prompt_tokens)
            self.metrics.completion_tokens.inc(usage.completion_tokens)


class _Prompts:
    """Sets the prompt of each choice of an answer, if prompts are echoed."""

    def __init__(self, call: CompletionCall, generations: Generations, answer: CompletionAnswer) -> None:
        self._answer = answer
        self._sources: Sequence[tuple[TextRequest, int]] = [
            (request, number) for number, request in enumerate(call.requests) for _ in range(request.sequences)
        ]
        self._generations = generations
        self._echo = call.echo

    def set(self, index: int) -> None:
        """Set the prompt, before the first event of a choice."""
        if self._echo:
            request, number = self._sources[index]
            text = request.prompt if isinstance(request.prompt, str) else None
            self._answer.set_prompt(index, text, self._generations.parts[number].prompt_logprobs)


def _final(request: TextRequest, chosen: Choice) -> TextRequest:
    """A request in its final form for the chosen model."""
    sampling = request.sampling.seeded() if chosen.model.takes_seeds else request.sampling
    return replace(request, model=chosen.model.name, adapter=chosen.adapter, sampling=sampling)


async def _send_error(exchange: Exchange, error: ApiError) -> int:
    """Send an error as the response, or as the last event of a stream; returns its status."""
    try:
        if exchange.failure is not None:
            await exchange.events(exchange.failure(error), more=False)
        else:
            await exchange.whole(error.status, error.body(), error.headers)
    except ClientGone:
        return _CLIENT_LEFT
    return error.status


def _of_bug(error: Exception) -> ApiError:
    """The error for a bug of the gateway. Only type and place are logged, as the message may contain the request's
    text."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place is not None else "?"
    _LOG.error("%s at %s while answering a request", type(error).__name__, where)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed")
