"""Calling a served text model: the same answer over gRPC or HTTP, streamed or whole."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Literal

from trtforge.core.errors import ForgeError
from trtforge.serve.grpc_client import GrpcClient
from trtforge.serve.http_client import HttpClient
from trtforge.serve.request import Generated, Piece, Sampling

Protocol = Literal["grpc", "http"]

__all__ = ["Generated", "Protocol", "Sampling", "generate", "stream_text"]


def stream_text(
    url: str, model: str, prompt: str, sampling: Sampling, *, protocol: Protocol = "grpc"
) -> Generator[str, None, None]:
    """Stream the answer's text; closing the iterator (or Ctrl-C) cancels the request on the server."""
    with closing(_pieces(url, model, prompt, sampling, protocol, stream=True)) as pieces:
        for piece in pieces:
            if piece.text:
                yield piece.text


def generate(
    url: str,
    model: str,
    prompt: str,
    sampling: Sampling,
    *,
    protocol: Protocol = "grpc",
    stream: bool = False,
    on_text: Callable[[str], None] | None = None,
    timeout: float | None = None,
) -> Generated:
    """Run one request to completion; `on_text` receives each piece of text. `timeout`: seconds without any data.

    Raises ForgeError if the server cannot be reached or refuses the request.
    """
    start = time.perf_counter()
    first = 0.0
    texts: list[str] = []
    input_tokens = output_tokens = None
    with closing(_pieces(url, model, prompt, sampling, protocol, stream=stream, timeout=timeout)) as pieces:
        for piece in pieces:
            first = first or time.perf_counter() - start
            texts.append(piece.text)
            input_tokens = piece.input_tokens if piece.input_tokens is not None else input_tokens
            output_tokens = piece.output_tokens if piece.output_tokens is not None else output_tokens
            if on_text is not None and piece.text:
                on_text(piece.text)
    if not texts:
        raise ForgeError(f"the server at {url} ended the request without an answer", hint="Look at the server's log.")
    return Generated("".join(texts), input_tokens, output_tokens, time.perf_counter() - start, first)


def _pieces(
    url: str,
    model: str,
    prompt: str,
    sampling: Sampling,
    protocol: Protocol,
    *,
    stream: bool,
    timeout: float | None = None,
) -> Generator[Piece, None, None]:
    if protocol == "grpc":
        yield from GrpcClient(url, timeout=timeout).pieces(model, prompt, sampling, stream=stream)
    elif stream:
        yield from HttpClient(url, timeout=timeout).stream(model, prompt, sampling)
    else:
        yield HttpClient(url, timeout=timeout).generate(model, prompt, sampling)
