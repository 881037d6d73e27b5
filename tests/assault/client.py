"""Many gRPC requests at once from one process: the raw streaming call of Triton's service on asyncio."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from tests.assault.messages import PROMPTS, is_refusal, outputs_of, reply_of, text_request
from tests.assault.server import AssaultError

Kind = Literal["answered", "refused", "error", "lost", "silent", "cancelled"]
"""answered: to its end; refused: an error with a code word; error: any other error for this request; lost: the
connection broke; silent: nothing final in time; cancelled: by us."""

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_STREAMS_A_CHANNEL = 250
_OF_THE_TRANSPORT = ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL")


@dataclass(frozen=True)
class Answer:
    """How one request ended; `first` and `seconds` from when it was sent. `responses`: with text."""

    kind: Kind
    text: str = ""
    error: str = ""
    responses: int = 0
    first: float = 0.0
    seconds: float = 0.0


@dataclass
class Progress:
    """What a request has got so far, for those who look from outside."""

    text: str = ""
    responses: int = 0
    last: float = 0.0
    """`time.monotonic()` of the last response."""


class Leave(Exception):
    """Raised by `on_text` to make the client cancel its request."""


def channel(url: str) -> Any:
    """A connection of its own."""
    return grpc.aio.insecure_channel(url, options=_OPTIONS)


@asynccontextmanager
async def stubs(url: str, requests: int) -> AsyncIterator[Sequence[Any]]:
    """Stubs over enough connections for that many requests at once."""
    channels = [channel(url) for _ in range(max(1, -(-requests // _STREAMS_A_CHANNEL)))]
    try:
        yield [service_pb2_grpc.GRPCInferenceServiceStub(each) for each in channels]
    finally:
        for each in channels:
            await each.close(grace=0)


async def ask(
    stub: Any,
    request: Any,
    *,
    within: float,
    on_text: Callable[[Progress], object] | None = None,
    progress: Progress | None = None,
    pause: float = 0.0,
) -> Answer:
    """Send a request, read to its end. `within`: seconds until it is silent; `pause`: between responses read."""
    state = progress or Progress()
    start = time.monotonic()
    first = 0.0
    call = stub.ModelStreamInfer()

    async def read() -> Answer:
        nonlocal first
        await call.write(request)
        await call.done_writing()
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                break
            reply = reply_of(response)
            if reply.error:
                return Answer("refused" if is_refusal(reply.error) else "error", state.text, reply.error)
            if reply.text is not None:
                first = first or time.monotonic() - start
                state.text += reply.text
                state.responses += 1
                state.last = time.monotonic()
                if on_text is not None:
                    on_text(state)
            if reply.final:
                # To the stream's end: cancelling now would have Triton 24.10 keep the stream's memory.
                while await call.read() is not grpc.aio.EOF:
                    pass
                return Answer("answered", state.text)
            if pause:
                await asyncio.sleep(pause)
        code, details = await call.code(), await call.details()
        if code == grpc.StatusCode.OK:
            return Answer("silent", state.text, "the stream ended without a final response")
        return Answer(*_failed(code, details or "", state.text))

    try:
        got = await asyncio.wait_for(read(), within)
    except asyncio.TimeoutError:
        got = Answer("silent", state.text, f"nothing final within {within:.0f} s")
    except Leave:
        got = Answer("cancelled", state.text)
    except grpc.aio.AioRpcError as error:
        got = Answer(*_failed(error.code(), error.details() or "", state.text))
    except (asyncio.InvalidStateError, grpc.aio.UsageError):
        # The call ended under a write: its status says why.
        got = Answer(*_failed(await call.code(), await call.details() or "", state.text))
    finally:
        call.cancel()
    return Answer(got.kind, got.text, got.error, state.responses, first, time.monotonic() - start)


def _failed(code: grpc.StatusCode, details: str, text: str) -> tuple[Kind, str, str]:
    if is_refusal(details):
        return "refused", text, details
    return ("lost" if code.name in _OF_THE_TRANSPORT else "error"), text, f"{code.name} {details}"


async def infer(stub: Any, request: Any, within: float) -> tuple[Mapping[str, bytes], str]:
    """A request without streaming: its outputs, and its error or nothing."""
    try:
        return outputs_of(await asyncio.wait_for(stub.ModelInfer(request), within)), ""
    except asyncio.TimeoutError:
        return {}, f"SILENT for {within:.0f} s"
    except grpc.aio.AioRpcError as error:
        return {}, error.details() or error.code().name


async def lone_runs(url: str, max_tokens: int, prompts: Sequence[str] = PROMPTS, within: float = 60) -> dict[str, str]:
    """Each prompt's answer when nothing else runs. Raises AssaultError if there is none."""
    texts = {}
    async with stubs(url, 1) as (stub,):
        for prompt in prompts:
            answer = await ask(stub, text_request(prompt, max_tokens), within=within)
            if answer.kind != "answered" or not answer.text:
                raise AssaultError(f"the lone run of {prompt!r} was {answer.kind}: {answer.error}")
            texts[prompt] = answer.text
    return texts


async def flood(url: str, count: int, max_tokens: int, within: float) -> list[tuple[str, Answer]]:
    """That many text requests at once, prompts in turns; each prompt with its answer."""
    async with stubs(url, count) as many:
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
        asked = (
            ask(many[number % len(many)], text_request(prompt, max_tokens), within=within)
            for number, prompt in enumerate(prompts)
        )
        return list(zip(prompts, await asyncio.gather(*asked), strict=True))
