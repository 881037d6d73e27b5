"""Text requests over gRPC: one bidirectional stream each, cancelled when the caller stops reading."""

import queue
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from trtforge.core.api_keys import KEY_VARIABLE
from trtforge.core.errors import ForgeError
from trtforge.formats.text_tensors import with_text_tensors
from trtforge.formats.triton import DtypeChoices, newest_release, tensors
from trtforge.serve.request import Piece, Prompt, Sampling, Value, refused, silent, unreachable
from trtforge.serve.spoken import other_protocol

# Servers are internal: bypass web proxies. Long prompts and logits exceed gRPC's default of 4 MB.
_CHANNEL = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]


class GrpcClient:
    """Client of one server, URL without scheme. `timeout`: seconds without any data; None: no limit."""

    def __init__(self, url: str, *, timeout: float | None = None) -> None:
        self._url = url
        self._timeout = timeout

    def inputs(self, model: str) -> frozenset[str]:
        """The names of a model's inputs; empty if the server does not report them.

        Raises ForgeError if it is unreachable or has no such model.
        """
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        with closing(InferenceServerClient(self._url, channel_args=_CHANNEL)) as client:
            try:
                found = client.get_model_metadata(model, client_timeout=self._timeout)
            except InferenceServerException as error:
                if "UNAVAILABLE" in str(error.status()) or "unknown model" in str(error.message()):
                    raise self._error(error) from None
                return frozenset()
        return frozenset(tensor.name for tensor in found.inputs)

    def pieces(self, model: str, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Iterator[Piece]:
        """The responses of one request as they arrive. Closing the generator cancels the request on the server.

        Raises ForgeError if the server cannot be reached or refuses.
        """
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        inputs = [_tensor(name, value) for name, value in sampling.inputs(prompt, stream=stream).items()]
        with closing(InferenceServerClient(self._url, channel_args=_CHANNEL)) as client:
            finished = False
            client.start_stream(lambda result, error: answers.put((result, error)))
            try:
                client.async_stream_infer(model, inputs, enable_empty_final_response=True)
                while not finished:
                    result, error = answers.get(timeout=self._timeout)
                    if error is not None:
                        raise self._error(error)
                    finished = result.get_response().parameters["triton_final_response"].bool_param
                    if result.as_numpy("text_output") is not None:
                        yield _piece(result)
            except queue.Empty:
                raise silent(self._url, self._timeout or 0.0) from None
            except InferenceServerException as error:
                # The stream broke before the request was sent: the callback receives the reason.
                with suppress(queue.Empty):
                    error = answers.get(timeout=1.0)[1] or error
                raise self._error(error) from None
            finally:
                client.stop_stream(cancel_requests=not finished)

    def _error(self, error: Any) -> ForgeError:
        if "UNAVAILABLE" in str(error.status()):
            return other_protocol(self._url, "grpc") or unreachable(self._url)
        if "UNAUTHENTICATED" in str(error.status()):
            return ForgeError(
                f"the server at {self._url} requires a key over gRPC, where trtforge sends none",
                hint=f"Use `trtforge infer --protocol http`, which sends the key in {KEY_VARIABLE}.",
            )
        return refused(error.message())


def _piece(result: Any) -> Piece:
    text = result.as_numpy("text_output").flat[0].decode(errors="replace")
    ended, thought = _told(result, "finish_reason"), _told(result, "prompt_thought")
    return Piece(text, _count(result, "num_input_tokens"), _count(result, "num_output_tokens"), ended or None, thought)


def _told(result: Any, name: str) -> str | None:
    value = result.as_numpy(name)
    return None if value is None else str(value.flat[0].decode())


def _count(result: Any, name: str) -> int | None:
    value = result.as_numpy(name)
    return None if value is None else int(value.flat[0])


def _tensor(name: str, value: Value) -> Any:
    """An input tensor of batch 1 with the dtype that the models declare."""
    import numpy as np
    from tritonclient.grpc import InferInput
    from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

    known = tensors("ensemble", "inputs", newest_release(), DtypeChoices())
    declared = next(t for t in with_text_tensors(known, "inputs", chat=True) if t.name == name)
    kind = declared.dtype.removeprefix("TYPE_").replace("STRING", "BYTES")
    items = value if isinstance(value, tuple) else (value,)
    data = [item.encode() if isinstance(item, str) else item for item in items]
    array = np.array([data], dtype=triton_to_np_dtype(kind))
    tensor = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor
