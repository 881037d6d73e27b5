"""A KServe v2 gRPC server without a model: answers with the prompt's words, as `FakeBackend` does.

`python -m tests.gateway.kserve_server [TOKENS]` prints its port; its answers have that many words, sent at once.
"""

import asyncio
import json
import struct
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.gateway.fake import INPUTS, FakeBackend
from trtforge.gateway.backend import BackendError
from trtforge.gateway.request import Piece, Sampling, TextRequest

_FORMATS = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "BOOL": "?"}


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Serves models of one FakeBackend. `lists`: tells the repository's index; `names`: its models.

    `unloaded`: as Triton while it stops.
    """

    def __init__(self, backend: FakeBackend, names: tuple[str, ...] = ("ensemble",), *, lists: bool = True) -> None:
        self.backend = backend
        self.names = names
        self.lists = lists
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.half_closed = 0
        self.unloaded = False

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self.backend.is_ready and not self.unloaded)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        if not self.lists:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header")
        names = () if self.unloaded and request.ready else self.names
        return service_pb2.RepositoryIndexResponse(
            models=[service_pb2.RepositoryIndexResponse.ModelIndex(name=name) for name in names]
        )

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        if self.unloaded:
            await context.abort(grpc.StatusCode.NOT_FOUND, not_loaded(request.name))
        if request.name not in self.names:
            message = f"Request for unknown model: '{request.name}' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        (model,) = await self.backend.models()
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        return service_pb2.ModelMetadataResponse(
            name=request.name,
            inputs=[tensor(name=name, datatype=kind, shape=[-1, 1]) for name, kind in model.inputs.items()],
            outputs=[tensor(name=name, datatype="BYTES", shape=[-1, 1]) for name in model.outputs],
        )

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            values = inputs_of(request)
            self.asked.append((request.model_name, values))
            if self.unloaded:
                yield service_pb2.ModelStreamInferResponse(error_message=not_loaded(request.model_name))
                continue
            try:
                async for piece in self.backend.generate(text_request(request.model_name, values)):
                    yield service_pb2.ModelStreamInferResponse(infer_response=response_of(piece))
            except BackendError as error:
                yield service_pb2.ModelStreamInferResponse(error_message=error.message)
            else:
                last = service_pb2.ModelStreamInferResponse()
                last.infer_response.parameters["triton_final_response"].bool_param = True
                yield last
        self.half_closed += 1


def not_loaded(model: str) -> str:
    """What Triton says of a model that it has unloaded."""
    return f"Request for unknown model: '{model}' has no available versions"


def inputs_of(request: Any) -> dict[str, Any]:
    """The inputs of a request by name: a value, or a tuple of several."""
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        assert tensor.datatype == INPUTS[tensor.name]
        count = tensor.shape[1]
        if tensor.datatype == "BYTES":
            found: list[Any] = []
            while raw:
                (size,) = struct.unpack_from("<I", raw)
                found.append(raw[4 : 4 + size].decode())
                raw = raw[4 + size :]
        else:
            found = list(struct.unpack(f"<{count}{_FORMATS[tensor.datatype]}", raw))
        assert len(found) == count
        values[tensor.name] = (
            found[0] if count == 1 and tensor.name not in ("input_ids", "stop_words") else tuple(found)
        )
    return values


def text_request(model: str, values: Mapping[str, Any]) -> TextRequest:
    """The inverse of what the gateway sends."""
    return TextRequest(
        model,
        values["max_tokens"],
        prompt=values.get("input_ids") or values.get("text_input"),
        messages=values.get("messages"),
        stream=values["stream"],
        sequences=values.get("num_return_sequences", 1),
        sampling=Sampling(values.get("temperature"), values.get("top_p")),
        stop=values.get("stop_words", ()),
        logprobs=values.get("return_logprobs", False),
        top_logprobs=values.get("top_logprobs", 0),
        prompt_logprobs=values.get("return_prompt_logprobs", False),
    )


def response_of(piece: Piece) -> Any:
    """A ModelInferResponse."""
    response = service_pb2.ModelInferResponse()
    counts = {"sequence_index": piece.sequence, "num_input_tokens": piece.input_tokens}
    counts["num_cached_tokens"] = piece.cached_tokens
    for name, count in (counts | {"num_output_tokens": piece.output_tokens}).items():
        if count is not None:
            response.outputs.add(name=name, datatype="INT32", shape=[1, 1])
            response.raw_output_contents.append(struct.pack("<i", count))
    texts = {"text_output": piece.text, "finish_reason": piece.finish_reason}
    if piece.logprobs:
        texts["logprobs"] = json.dumps(piece.logprobs)
    if piece.prompt_thought is not None:
        texts["prompt_thought"] = piece.prompt_thought
    if piece.prompt_logprobs:
        texts["prompt_logprobs"] = json.dumps(piece.prompt_logprobs)
    for name, text in texts.items():
        data = text.encode()
        response.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
    return response


@contextmanager
def serving(servicer: Servicer, port: int = 0) -> Iterator[str]:
    """The address of a server that runs in a thread meanwhile."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Any, int]:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        chosen = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, chosen

    server, chosen = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield f"127.0.0.1:{chosen}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def main() -> None:
    """Serve until standard input closes."""
    words = tuple(f" word{number}" for number in range(int(sys.argv[1]))) if len(sys.argv) > 1 else None
    with serving(Servicer(FakeBackend(words))) as address:
        print(address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
