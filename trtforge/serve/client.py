"""Calling a served text model: the same answer over gRPC or HTTP, streamed or whole."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from trtforge.core.errors import ForgeError
from trtforge.core.server_errors import STREAMING_OFF
from trtforge.formats.text_tensors import MESSAGES
from trtforge.serve.grpc_client import GrpcClient
from trtforge.serve.request import Chat, Generated, Piece, Prompt, Refused, Sampling
from trtforge.serve.spoken import Protocol

if TYPE_CHECKING:
    from trtforge.serve.http_client import HttpClient

__all__ = ["Generated", "Protocol", "Sampling", "generate", "stream_text"]


def stream_text(
    url: str, model: str, prompt: Prompt, sampling: Sampling, *, protocol: Protocol = "grpc"
) -> Generator[str, None, None]:
    """Stream the answer's text; closing the iterator (or Ctrl-C) cancels the request on the server."""
    client = _client(url, protocol, None)
    with closing(_pieces(client, model, prompt, _supported(client, model, prompt, sampling), stream=True)) as pieces:
        for piece in pieces:
            if piece.text:
                yield piece.text


def generate(
    url: str,
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    *,
    protocol: Protocol = "grpc",
    stream: bool = False,
    on_text: Callable[[str], None] | None = None,
    on_first: Callable[[Piece], None] | None = None,
    timeout: float | None = None,
    needs_stream: bool = False,
) -> Generated:
    """Run one request to completion; `on_text` receives each piece of text. `timeout`: seconds without any data.

    `on_first` receives the first response, before its text.

    If the repository does not stream, the whole answer is one piece. Raises ForgeError if the server cannot be reached
    or refuses the request, and with `needs_stream` if it does not stream.
    """
    client = _client(url, protocol, timeout)
    sampling = _supported(client, model, prompt, sampling)
    try:
        return _answered(client, url, model, prompt, sampling, stream=stream, on_text=on_text, on_first=on_first)
    except Refused as error:
        if not stream or needs_stream or STREAMING_OFF not in error.message:
            raise
        return _answered(client, url, model, prompt, sampling, stream=False, on_text=on_text, on_first=on_first)


def _answered(
    client: "GrpcClient | HttpClient",
    url: str,
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    *,
    stream: bool,
    on_text: Callable[[str], None] | None,
    on_first: Callable[[Piece], None] | None,
) -> Generated:
    start = time.perf_counter()
    first = 0.0
    texts: list[str] = []
    input_tokens = output_tokens = reason = None
    with closing(_pieces(client, model, prompt, sampling, stream=stream)) as pieces:
        for piece in pieces:
            if on_first is not None and not texts:
                on_first(piece)
            first = first or time.perf_counter() - start
            texts.append(piece.text)
            input_tokens = piece.input_tokens if piece.input_tokens is not None else input_tokens
            output_tokens = piece.output_tokens if piece.output_tokens is not None else output_tokens
            reason = piece.finish_reason or reason
            if on_text is not None and piece.text:
                on_text(piece.text)
    if not texts:
        raise ForgeError(f"the server at {url} ended the request without an answer", hint="Look at the server's log.")
    return Generated("".join(texts), input_tokens, output_tokens, time.perf_counter() - start, first, reason)


def _client(url: str, protocol: Protocol, timeout: float | None) -> "GrpcClient | HttpClient":
    if protocol == "grpc":
        return GrpcClient(url, timeout=timeout)
    from trtforge.serve.http_client import HttpClient  # httpx imports rich and pygments

    return HttpClient(url, timeout=timeout)


def _supported(client: "GrpcClient | HttpClient", model: str, prompt: Prompt, sampling: Sampling) -> Sampling:
    """The options without outputs that the model lacks.

    Queries the server only for the finish reason, cut stop words or chat messages. Raises ForgeError for chat messages
    if the served tokenizer has no chat template.
    """
    if not sampling.finish_reason and not sampling.cuts_stop and isinstance(prompt, str):
        return sampling
    inputs = client.inputs(model)
    if isinstance(prompt, Chat) and inputs and MESSAGES not in inputs:
        raise ForgeError(
            f"{model} does not accept chat messages: the served tokenizer has no chat template",
            hint="Leave out --chat to complete the prompt as it is, or package the engine again with the tokenizer of "
            "an instruct model.",
        )
    return sampling.known_to(inputs)


def _pieces(
    client: "GrpcClient | HttpClient", model: str, prompt: Prompt, sampling: Sampling, *, stream: bool
) -> Generator[Piece, None, None]:
    if isinstance(client, GrpcClient):
        yield from client.pieces(model, prompt, sampling, stream=stream)
    elif stream:
        yield from client.stream(model, prompt, sampling)
    else:
        yield client.generate(model, prompt, sampling)
