"""`python -m tests.benchmarks.bare_proxy BACKEND PORT`: the least that a FastAPI program does to pass a prompt on.

It checks nothing, answers nothing but whole completions, and notices no client that leaves.
"""

import asyncio
import sys
from typing import Any

import grpc
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from tritonclient.grpc import service_pb2, service_pb2_grpc

_app = FastAPI()
_stubs: list[Any] = []


@_app.post("/v1/completions")
async def completions(request: Request) -> Any:
    """The text of the only response."""
    values = await request.json()
    message = service_pb2.ModelInferRequest(model_name=values["model"])
    inputs = {
        "text_input": ("BYTES", _text(values["prompt"])),
        "max_tokens": ("INT32", values["max_tokens"].to_bytes(4, "little")),
        "stream": ("BOOL", b"\0"),
    }
    for name, (kind, raw) in inputs.items():
        message.inputs.add(name=name, datatype=kind, shape=[1, 1])
        message.raw_input_contents.append(raw)
    texts = []
    async for response in _stubs[0].ModelStreamInfer(iter([message])):
        found = response.infer_response
        for tensor, raw in zip(found.outputs, found.raw_output_contents, strict=True):
            if tensor.name == "text_output":
                texts.append(raw[4:].decode())
    return {"choices": [{"text": "".join(texts)}]}


def _text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "little") + data


async def _serve(backend: str, port: int) -> None:
    _stubs.append(service_pb2_grpc.GRPCInferenceServiceStub(grpc.aio.insecure_channel(backend)))
    await uvicorn.Server(uvicorn.Config(_app, port=port, http="h11", access_log=False, lifespan="off")).serve()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
