"""An engine model that Triton itself runs (TensorRT-LLM's C++ backend), called over gRPC by one event loop.

Not by BLS: decoupled BLS calls from several threads sometimes deadlock (Triton 24.10, `Stub::GetResponseIterator`
against `ProcessBLSResponseDecoupled`; fixed upstream by python_backend#439).
"""

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from input_names import CONTEXT_ONLY, PHASE, REQUEST_TYPE
from kserve_messages import (
    SERVICE,
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
    arrays_of,
    infer_request,
)
from model_config import ModelConfig
from numpy.typing import NDArray
from responder import INVALID_ARGUMENT, UNAVAILABLE
from text_engine import Piece, PieceReceiver

URL_VARIABLE = "TRTFORGE_GRPC_URL"
_DEFAULT_URL = "127.0.0.1:8001"
_PING_SECONDS = 10.0
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]
_OUTPUT_IDS, _LENGTH, _SEQUENCE = "output_ids", "sequence_length", "sequence_index"


class EngineError(Exception):
    """An error returned by the engine model."""


class TritonEngine:
    """A TextEngine that calls the server of this model, at TRTFORGE_GRPC_URL (default 127.0.0.1:8001)."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.text("tensorrt_llm_model_name")
        self._outputs = [_OUTPUT_IDS, _LENGTH, *(name for name, _ in config.pairs("engine_to_text"))]
        self._bfloat16 = frozenset(name for name in config.text("bfloat16_inputs").split(",") if name)
        self._streams = config.decoupled
        self._loop = asyncio.new_event_loop()
        self._channel: Any = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()

    def start(
        self,
        inputs: Mapping[str, NDArray[Any]],
        receiver: PieceReceiver,
        timeout: float | None,
        *,
        model_end_ids: bool,
        watched: bool,
    ) -> object:
        """See TextEngine. `model_end_ids` is ignored: the inputs hold the end ids (`end_ids_as_stop_words`)."""
        if watched:
            inputs = {**inputs, "streaming": np.array([[True]])}
        started = asyncio.run_coroutine_threadsafe(self._run(inputs, receiver, timeout), self._loop)

        def on_end(ended: "Future[None]") -> None:
            if ended.cancelled():  # `_run` does not tell, and may not even have begun
                self._loop.call_soon_threadsafe(receiver.take, [_failed("the request was cancelled", "CANCELLED")])

        started.add_done_callback(on_end)
        return started

    def together(self) -> AbstractContextManager[None]:
        """Does nothing: each request is its own call."""
        return nullcontext()

    def cancel(self, started: Any) -> None:
        """See TextEngine. Cancels the gRPC call; Triton then cancels the request in the engine."""
        started.cancel()

    def ping(self, answer: Callable[[tuple[str, str] | None], None]) -> None:
        """See TextEngine. Sends a stop request for an unused id, which the engine's own thread answers."""
        asyncio.run_coroutine_threadsafe(self._ping(answer), self._loop)

    def close(self) -> None:
        """See TextEngine."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _run(self, inputs: Mapping[str, NDArray[Any]], receiver: PieceReceiver, timeout: float | None) -> None:
        try:
            sequences = await asyncio.wait_for(self._pass_on(inputs, receiver), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            receiver.take([_failed("the request's timeout has passed", "DEADLINE_EXCEEDED")])
        except Exception as error:
            receiver.take([_failed(_message(error), _code(error))])
        else:
            ends = sequences or {0: 1}
            receiver.take([Piece(sequence, [[]] * beams, True) for sequence, beams in ends.items()])

    async def _pass_on(self, inputs: Mapping[str, NDArray[Any]], receiver: PieceReceiver) -> dict[int, int]:
        """Pass the pieces on; returns the number of beams of each returned sequence."""
        sequences: dict[int, int] = {}
        async for result in self._responses_of(self._model, inputs, self._outputs):
            piece = _piece(result, [*self._outputs[2:], PHASE])
            if piece is not None:
                sequences[piece.sequence] = len(piece.beams)
                receiver.take([piece])
        return sequences

    async def _responses_of(
        self, model: str, inputs: Mapping[str, NDArray[Any]], outputs: list[str]
    ) -> AsyncIterator[dict[str, NDArray[Any]]]:
        """The tensors of each response. Raises EngineError, and what grpc raises."""
        kind = inputs[REQUEST_TYPE].flat[0].decode() if REQUEST_TYPE in inputs else None
        request = infer_request(
            model,
            uuid.uuid4().hex,
            {name: value for name, value in inputs.items() if name != REQUEST_TYPE},
            [*outputs, PHASE] if kind == CONTEXT_ONLY else outputs,
            self._bfloat16,
            {} if kind is None else {REQUEST_TYPE: kind},
        )
        if not self._streams:
            infer = self._method("unary_unary", "ModelInfer", ModelInferResponse)
            yield arrays_of(await infer(request))
            return
        call = self._method("stream_stream", "ModelStreamInfer", ModelStreamInferResponse)(iter([request]))
        error = ""
        try:
            # Read to the end of the stream: Triton before 25.04 leaks memory and a file descriptor if a stream is
            # cancelled while its last response is sent (triton-inference-server/server #8078).
            async for response in call:
                error = error or response.error_message
                if not response.error_message:
                    yield arrays_of(response.infer_response)
        finally:
            call.cancel()
        if error:
            raise EngineError(error)

    def _method(self, kind: str, name: str, response: Any) -> Any:
        """A gRPC method of the server. The channel belongs to the event loop, so it is created there."""
        import grpc

        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(os.environ.get(URL_VARIABLE, _DEFAULT_URL), options=_OPTIONS)
        make = getattr(self._channel, kind)
        return make(
            SERVICE + name,
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=response.FromString,
        )

    async def _ping(self, answer: Callable[[tuple[str, str] | None], None]) -> None:
        one = np.ones((1, 1), dtype=np.int32)
        inputs = {"input_ids": one, "input_lengths": one, "request_output_len": one, "stop": np.array([[True]])}
        try:
            await asyncio.wait_for(self._pass_on(inputs, _DISCARD), _PING_SECONDS)
        except Exception as error:
            answer((_message(error) or "the engine does not answer", UNAVAILABLE))
        else:
            answer(None)

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()


class _Discard:
    """Discards the pieces of a ping."""

    def take(self, pieces: list[Piece]) -> None: ...


_DISCARD = _Discard()


def _piece(tensors: Mapping[str, NDArray[Any]], optional: list[str]) -> Piece | None:
    """An engine response as a piece; None for one without tokens (the final flag alone)."""
    if _OUTPUT_IDS not in tensors:
        return None
    beams = [beam[:length].tolist() for beam, length in zip(tensors[_OUTPUT_IDS][0], tensors[_LENGTH][0], strict=True)]
    sequence = int(tensors[_SEQUENCE].flat[0]) if _SEQUENCE in tensors else 0
    return Piece(sequence, beams, False, {name: tensors[name] for name in optional if name in tensors})


def _failed(message: str, code: str) -> Piece:
    return Piece(0, [], True, failure=(message, code))


def _message(error: Exception) -> str:
    """Triton's message, which grpc's errors hold in their details."""
    details = getattr(error, "details", None)
    message = details() if callable(details) else str(error)
    return message or type(error).__name__


def _code(error: Exception) -> str:
    status = getattr(error, "code", None)
    unavailable = "UNAVAILABLE" in str(status() if callable(status) else "") or "queue" in _message(error)
    return UNAVAILABLE if unavailable else INVALID_ARGUMENT
