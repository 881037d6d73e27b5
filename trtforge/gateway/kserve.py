"""A KServe v2 gRPC server as a backend: Triton with a repository of trtforge, with any engine."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtforge.core.server_errors import (
    SHUTTING_DOWN,
    TRITON_NOT_LOADED,
    TRITON_QUEUE_FULL,
    TRITON_STOPPING,
    code_of,
)
from trtforge.gateway.backend import GONE, BackendError, ServedModel
from trtforge.gateway.kserve_tensors import PACKAGE_AGAIN, infer_request, piece_of
from trtforge.gateway.request import Piece, TextRequest

_CHANNEL = [
    ("grpc.enable_http_proxy", 0),  # servers are internal
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]
_ANSWER_SECONDS = 5.0  # for all calls except generation
_ENSEMBLE, _BLS = "ensemble", "tensorrt_llm_bls"
_OLDER = "the field 'guide_allows_calls' is not one of"
"""Error of text models that were packaged before this field of messages existed."""
_NOT_SERVING = "the model server is stopping, or its model is not loaded"
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)  # cancelled: by the server


class KServeBackend:
    """One server at HOST:PORT. `names`: its text models; empty: ask the server, which may refuse to list them."""

    def __init__(self, address: str, names: tuple[str, ...] = ()) -> None:
        self.address = address
        self._names = names
        self._known: dict[str, ServedModel] = {}
        self._without_stop_model: set[str] = set()
        self._channel: Any = None
        self._stub: Any = None

    async def models(self) -> tuple[ServedModel, ...]:
        """See Backend."""
        names = self._names or await self._listed()
        found = [model for name in names if (model := await self._model(name)).is_text_model]
        if not found and not await self.ready():  # Triton's index does not list models that are not loaded
            raise BackendError(_NOT_SERVING, GONE)
        if not found:
            raise BackendError(f"the server at {self.address} has no text model", "NOT_FOUND")
        return tuple(found)

    async def ready(self) -> bool:
        """See Backend."""
        try:
            answer = await self._calls().ServerReady(service_pb2.ServerReadyRequest(), timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def generate(self, request: TextRequest) -> AsyncGenerator[Piece, None]:
        """See Backend."""
        model = await self._model_for(request)
        message = infer_request(model, request)
        call = self._calls().ModelStreamInfer(iter([message]))
        error, ended = "", False
        try:
            # Read to the end of the stream: Triton before 25.04 leaks memory and a file descriptor if a stream is
            # cancelled while its last response is sent.
            async for response in call:
                if response.error_message:
                    error = error or response.error_message
                elif (piece := piece_of(response.infer_response)) is not None:
                    yield piece
            ended = True
        except grpc.aio.AioRpcError as failure:
            ended = True
            raise self._failed(failure) from None
        finally:
            if not ended:
                call.cancel()
        if error:
            raise self._refused(error)

    async def close(self) -> None:
        """See Backend."""
        if self._channel is not None:
            await self._channel.close()

    def _calls(self) -> Any:
        """The gRPC methods of the server. The channel belongs to the running event loop."""
        if self._stub is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub

    async def _listed(self) -> tuple[str, ...]:
        """Names in the repository's index; the default name if the server keeps its index closed."""
        try:
            answer = await self._calls().RepositoryIndex(
                service_pb2.RepositoryIndexRequest(ready=True), timeout=_ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in _LOST and not await self.ready():
                raise self._failed(error) from None
            return (_ENSEMBLE,)
        names = [model.name for model in answer.models]
        main = tuple(name for name in names if name.endswith(_ENSEMBLE))
        return main or tuple(names)

    async def _model(self, name: str) -> ServedModel:
        known = self._known.get(name)
        if known is None:
            request = service_pb2.ModelMetadataRequest(name=name)
            try:
                answer = await self._calls().ModelMetadata(request, timeout=_ANSWER_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise self._failed(error) from None
            known = self._known[name] = ServedModel(
                name,
                {tensor.name: tensor.datatype for tensor in answer.inputs},
                frozenset(tensor.name for tensor in answer.outputs),
            )
        return known

    async def _model_for(self, request: TextRequest) -> ServedModel:
        """The model for a request: with stop words, the one beside the ensemble that finds them in the text."""
        name = request.model
        if request.stop and name.endswith(_ENSEMBLE) and name not in self._without_stop_model:
            try:
                return await self._model(name.removesuffix(_ENSEMBLE) + _BLS)
            except BackendError as error:
                if error.code == GONE:
                    raise
                self._without_stop_model.add(name)
        return await self._model(name)

    def _failed(self, error: Any) -> BackendError:
        """The error of a call that failed as a whole. After a lost connection, the models may have changed."""
        status, details = error.code(), error.details() or ""
        code = code_of(details)
        if code is None and (TRITON_NOT_LOADED in details or TRITON_STOPPING in details):
            return self._refused(details)
        if code is None and "unknown model" in details:
            return BackendError(details, "NOT_FOUND")
        if code is None and status in _LOST:
            self._forget()
            return BackendError("the model server cannot be reached", GONE)
        return BackendError(details or status.name, code or status.name)

    def _refused(self, message: str) -> BackendError:
        """The error for a request that was refused: GONE if the server is stopping, as another server may serve it."""
        if TRITON_NOT_LOADED in message or TRITON_STOPPING in message:
            self._forget()
            return BackendError(_NOT_SERVING, GONE)
        if SHUTTING_DOWN in message:
            return BackendError(message, GONE)
        if _OLDER in message:
            return BackendError(
                f"this model does not support a response format together with tools; {PACKAGE_AGAIN}",
                "INVALID_ARGUMENT",
            )
        return BackendError(message, code_of(message) or ("UNAVAILABLE" if TRITON_QUEUE_FULL in message else None))

    def _forget(self) -> None:
        self._known.clear()
        self._without_stop_model.clear()
