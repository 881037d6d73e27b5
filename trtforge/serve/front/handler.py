"""Relays requests to Triton: checks them, sends them on in one piece and returns answers as they arrive."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar

import h11

from trtforge.core.held_bytes import HeldBytes
from trtforge.core.host_check import HostCheck
from trtforge.serve.address import Address
from trtforge.serve.front.answers import as_refusal, stream_error, whole_error
from trtforge.serve.front.incoming import ClientGone, Incoming, too_large
from trtforge.serve.front.json_body import parse_object
from trtforge.serve.front.keys import Keys
from trtforge.serve.front.limits import KIB, FrontLimits
from trtforge.serve.front.refusal import Refusal, error_body, unavailable
from trtforge.serve.front.routes import Route, find_route
from trtforge.serve.front.tensors import check_generate, check_infer, check_numbers
from trtforge.serve.front.upstream import Exchange, exchange

T = TypeVar("T")
_BINARY = b"inference-header-content-length"
_PASSED_ON = frozenset((b"content-type", _BINARY))
_PASSED_BACK = frozenset((b"content-type", b"content-length", _BINARY))
_ERROR_BYTES = 64 * KIB
_METADATA_BYTES = 1024 * KIB
_LARGE = 32 * KIB


@dataclass(frozen=True)
class Policy:
    """Triton's address, the open endpoint groups, the API keys, the limits and the check of Host and Origin."""

    upstream: Address
    opened: Collection[str] = ()
    keys: Keys | None = None
    limits: FrontLimits = field(default_factory=FrontLimits)
    hosts: HostCheck | None = None


class Handler:
    """Answers requests; shared by all connections, because it counts the requests in Triton."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._running = 0
        held, retry = policy.limits.held_bytes, policy.limits.retry_seconds
        self._held = HeldBytes(held, lambda: unavailable(f"bodies of {held} bytes are in flight", retry))

    async def answer(self, client: Incoming, request: h11.Request) -> None:
        """Answer one request. Raises Refusal if it fails before any part of the answer was sent."""
        limits = self._policy.limits
        headers = _headers(request)
        route, path = find_route(
            request.method.decode("ascii"), request.target.decode("latin-1"), self._policy.opened, limits
        )
        if route.kind != "health":
            self._require_allowed(headers)
        if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not accepted")
        counted = route.kind != "health"
        if counted and self._running >= limits.requests:
            raise unavailable(f"{limits.requests} requests are running", limits.retry_seconds)
        bound = _body_bound(route, headers, limits)
        self._running += counted
        try:
            with self._held.request() as hold:
                body = await client.body(bound, hold)
                await self._check(body, route, path, headers)
                seconds = None if route.kind in ("generate", "infer") else limits.answer_seconds
                await self._exchange(client, request.method, path, headers, body, seconds)
        finally:
            self._running -= counted

    def _require_allowed(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Refusal: 403 for a Host or Origin that is not allowed, 401 without a key."""
        reason = None if self._policy.hosts is None else self._policy.hosts.why_refused(headers)
        if reason is not None:
            raise Refusal(HTTPStatus.FORBIDDEN, reason)
        if self._policy.keys is not None:
            self._policy.keys.require(headers)

    async def _check(self, body: bytes, route: Route, path: str, headers: Mapping[bytes, bytes]) -> None:
        limits = self._policy.limits
        if route.kind == "generate":
            large = await _run(body, lambda: check_generate(body, limits))
            if large:
                check_numbers(large, await self._metadata(path.rpartition("/")[0]), limits)
        elif route.kind == "infer":
            shared = "shared-memory" in self._policy.opened
            await _run(body, lambda: check_infer(body, _length(headers, _BINARY), limits, shared_memory=shared))
        elif body:
            parse_object(body, limits)

    async def _metadata(self, path: str) -> bytes:
        """Triton's answer about a model, also if it is an error."""
        limits = self._policy.limits
        async with exchange(self._policy.upstream, limits) as triton:
            await _within(limits.answer_seconds, triton.send("GET", path, [], b""))
            return await triton.whole(_METADATA_BYTES)

    async def _exchange(
        self,
        client: Incoming,
        method: bytes,
        path: str,
        headers: Mapping[bytes, bytes],
        body: bytes,
        seconds: float | None,
    ) -> None:
        """Relay request and answer; the connection to Triton is closed as soon as the client closes its own."""
        passed = [(name, value) for name, value in headers.items() if name in _PASSED_ON]

        async def relay() -> None:
            async with exchange(self._policy.upstream, self._policy.limits) as triton:
                response = await _within(seconds, triton.send(method.decode(), path, passed, body))
                await self._relay(client, triton, response)

        relaying, leaving = asyncio.ensure_future(relay()), asyncio.ensure_future(client.gone())
        try:
            await asyncio.wait({relaying, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not relaying.done():
                raise ClientGone
            relaying.result()
        finally:
            for task in (relaying, leaving):
                task.cancel()
            await asyncio.gather(relaying, leaving, return_exceptions=True)

    async def _relay(self, client: Incoming, triton: Exchange, response: h11.Response) -> None:
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            raise as_refusal(response.status_code, await triton.whole(_ERROR_BYTES), self._policy.limits.retry_seconds)
        headers = [(name, value) for name, value in response.headers if name in _PASSED_BACK]
        streaming = any(value.startswith(b"text/event-stream") for name, value in headers if name == b"content-type")
        pieces = triton.pieces()
        error_in = stream_error if streaming else whole_error
        try:
            async for piece in pieces:
                if not client.answering and (error := error_in(piece)) is not None:
                    raise as_refusal(HTTPStatus.BAD_REQUEST, error, self._policy.limits.retry_seconds)
                if not client.answering:
                    await client.start(response.status_code, headers)
                await client.piece(piece)
        except ConnectionError:
            await _broken_off(client, streaming=streaming)
            return
        if not client.answering:
            await client.start(response.status_code, headers)
        await client.finish()


async def _within(seconds: float | None, answer: Awaitable[T]) -> T:
    """The answer. Raises Refusal (504) if it takes longer; None: no limit."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except asyncio.TimeoutError:
        raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, f"no answer from the server in {seconds:g} s") from None


async def _broken_off(client: Incoming, *, streaming: bool) -> None:
    """Report an incomplete answer: by a status, by a last event, or by closing the connection."""
    message = "UNAVAILABLE: the server ended during the answer"
    if not client.answering:
        raise Refusal(HTTPStatus.BAD_GATEWAY, message)
    if not streaming:
        raise ClientGone
    await client.piece(b"data: " + error_body(message) + b"\n\n")
    await client.finish()


def _body_bound(route: Route, headers: Mapping[bytes, bytes], limits: FrontLimits) -> int:
    """The largest size of the body in bytes: its declared length, else the limit. Raises Refusal (413)."""
    limit = limits.binary_bytes if route.kind == "infer" and _BINARY in headers else limits.json_bytes
    if b"transfer-encoding" in headers:
        return limit
    declared = _length(headers, b"content-length") or 0
    if declared > limit:
        raise too_large(limit)
    return declared


async def _run(body: bytes, check: Callable[[], T]) -> T:
    """The result of `check`, which runs in a thread if the body is large, so that streams continue."""
    return await asyncio.to_thread(check) if len(body) > _LARGE else check()


def _headers(request: h11.Request) -> dict[bytes, bytes]:
    """The headers by name. Raises Refusal (400) for a repeated header that determines the body or the key."""
    found: dict[bytes, bytes] = {}
    for raw_name, raw_value in request.headers:
        name, value = bytes(raw_name), bytes(raw_value)
        if name in found and name in (b"content-length", b"transfer-encoding", b"authorization", b"x-api-key", _BINARY):
            raise Refusal(HTTPStatus.BAD_REQUEST, f"the header {name.decode('ascii')} is given twice")
        found[name] = value
    if b"content-length" in found and b"transfer-encoding" in found:
        raise Refusal(HTTPStatus.BAD_REQUEST, "Content-Length and Transfer-Encoding exclude each other")
    return found


def _length(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 15:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"the header {name.decode('ascii')} is not a number of bytes")
    return int(value)
