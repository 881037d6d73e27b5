"""An engine model that Triton itself runs (TensorRT-LLM's C++ backend), called over gRPC by one event loop.

Not by BLS: decoupled BLS calls from several threads block one another for ever now and then (Triton 24.10,
`Stub::GetResponseIterator` against `ProcessBLSResponseDecoupled`; mended upstream by python_backend#439).
"""

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from model_config import ModelConfig
from responder import INVALID_ARGUMENT, UNAVAILABLE
from text_engine import Piece, PieceReceiver

URL_VARIABLE = "TRTFORGE_GRPC_URL"
_DEFAULT_URL = "127.0.0.1:8001"
_PING_SECONDS = 10.0
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_OUTPUT_IDS, _LENGTH, _SEQUENCE, _FINAL = "output_ids", "sequence_length", "sequence_index", "triton_final_response"


class TritonEngine:
    """A TextEngine. Its server is the one that runs this model, at TRTFORGE_GRPC_URL (127.0.0.1:8001)."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.text("tensorrt_llm_model_name")
        self._outputs = [_OUTPUT_IDS, _LENGTH, *(name for name, _ in config.pairs("engine_to_text"))]
        self._streams = config.decoupled
        self._loop = asyncio.new_event_loop()
        self._client: Any = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()

    def start(
        self, inputs: Mapping[str, np.ndarray], receiver: PieceReceiver, timeout: float | None, *, model_end_ids: bool
    ) -> object:
        """As TextEngine says. The model's end ids are in the inputs (`end_ids_as_stop_words`)."""
        return asyncio.run_coroutine_threadsafe(self._run(inputs, receiver, timeout), self._loop)

    def together(self) -> AbstractContextManager[None]:
        """Each request is a call of its own."""
        return nullcontext()

    def cancel(self, started: Any) -> None:
        """As TextEngine says: cancels the call, which Triton tells the engine."""
        started.cancel()

    def ping(self, answer: Callable[[tuple[str, str] | None], None]) -> None:
        """A stop request for an id that nobody has goes through the engine's own thread."""
        asyncio.run_coroutine_threadsafe(self._ping(answer), self._loop)

    def close(self) -> None:
        """As TextEngine says."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _run(self, inputs: Mapping[str, np.ndarray], receiver: PieceReceiver, timeout: float | None) -> None:
        try:
            sequences = await asyncio.wait_for(self._pass_on(inputs, receiver), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            receiver.take([_failed("the request's timeout has passed", "DEADLINE_EXCEEDED")])
        except Exception as error:
            receiver.take([_failed(_message(error), _code(error))])
        else:
            ends = sequences or {0: 1}
            receiver.take([Piece(sequence, [[]] * beams, True) for sequence, beams in ends.items()])

    async def _pass_on(self, inputs: Mapping[str, np.ndarray], receiver: PieceReceiver) -> dict[int, int]:
        """Pass the pieces on; the number of beams of each returned sequence."""
        sequences: dict[int, int] = {}
        async for result in self._responses(inputs, uuid.uuid4().hex):
            piece = _piece(result, self._outputs[2:])
            if piece is not None:
                sequences[piece.sequence] = len(piece.beams)
                receiver.take([piece])
        return sequences

    async def _responses(self, inputs: Mapping[str, np.ndarray], request_id: str) -> AsyncIterator[Any]:
        from tritonclient.grpc import InferRequestedOutput

        client = self._connected()
        request = {
            "model_name": self._model,
            "inputs": [_tensor(name, value) for name, value in inputs.items()],
            "outputs": [InferRequestedOutput(name) for name in self._outputs],
            "request_id": request_id,
        }
        if not self._streams:
            yield await client.infer(**request)
            return

        async def once() -> AsyncIterator[Mapping[str, Any]]:
            yield {**request, "enable_empty_final_response": True}

        async for result, error in client.stream_infer(once()):
            if error is not None:
                raise error
            yield result

    async def _ping(self, answer: Callable[[tuple[str, str] | None], None]) -> None:
        one = np.ones((1, 1), dtype=np.int32)
        inputs = {"input_ids": one, "input_lengths": one, "request_output_len": one, "stop": np.array([[True]])}
        try:
            await asyncio.wait_for(self._pass_on(inputs, _NOBODY), _PING_SECONDS)
        except Exception as error:
            answer((_message(error) or "the engine does not answer", UNAVAILABLE))
        else:
            answer(None)

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def _connected(self) -> Any:
        """The client, made on the event loop that it belongs to."""
        from tritonclient.grpc.aio import InferenceServerClient

        if self._client is None:
            self._client = InferenceServerClient(os.environ.get(URL_VARIABLE, _DEFAULT_URL), channel_args=_UNLIMITED)
        return self._client


class _Nobody:
    """Takes the pieces of a ping."""

    def take(self, pieces: list[Piece]) -> None: ...


_NOBODY = _Nobody()


def _piece(result: Any, optional: list[str]) -> Piece | None:
    """An engine response as a piece; None for one without tokens (the final flag alone)."""
    ids = result.as_numpy(_OUTPUT_IDS)
    if ids is None:
        return None
    lengths = result.as_numpy(_LENGTH)[0]
    sequence = result.as_numpy(_SEQUENCE)
    beams = [beam[:length].tolist() for beam, length in zip(ids[0], lengths, strict=True)]
    outputs = {name: value for name in optional if (value := result.as_numpy(name)) is not None}
    return Piece(int(sequence.flat[0]) if sequence is not None else 0, beams, False, outputs)


def _tensor(name: str, value: np.ndarray) -> Any:
    from tritonclient.grpc import InferInput
    from tritonclient.utils import np_to_triton_dtype

    tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    tensor.set_data_from_numpy(value)
    return tensor


def _failed(message: str, code: str) -> Piece:
    return Piece(0, [], True, failure=(message, code))


def _message(error: Exception) -> str:
    message = getattr(error, "message", None)
    return str(message() if callable(message) else error)


def _code(error: Exception) -> str:
    status = getattr(error, "status", None)
    said = str(status() if callable(status) else "")
    return UNAVAILABLE if "UNAVAILABLE" in said or "queue" in _message(error) else INVALID_ARGUMENT
