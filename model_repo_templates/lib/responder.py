"""One request's side towards Triton: its inputs, its responses and whether the client is still there."""

import threading
from collections.abc import Mapping

import numpy as np
import triton_python_backend_utils as pb_utils


class RequestFailed(Exception):
    """Ends one request with this message; no other request notices."""


class Responder:
    """Sends the responses of one request, from any thread.

    The inputs are copied: Triton takes their memory back when `execute` returns. Asking a finished request whether
    it was cancelled ends the server with a segmentation fault (Triton 24.10), so both happen under one lock.
    """

    def __init__(self, request: "pb_utils.InferenceRequest") -> None:
        self.request_id: str = request.request_id()
        self.inputs: Mapping[str, np.ndarray] = {
            tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()
        }
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._done = False
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Whether the last response was sent."""
        return self._done

    def cancelled(self) -> bool:
        """Whether the client gave up or went away."""
        with self._lock:
            if not self._done and not self._cancelled:
                self._cancelled = bool(self._sender.is_cancelled())
            return self._cancelled

    def send(self, outputs: Mapping[str, np.ndarray], *, final: bool = False) -> None:
        """Send a response; after the final one nothing more is sent."""
        tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items()]
        self._send(pb_utils.InferenceResponse(tensors), final=final)

    def fail(self, message: str) -> None:
        """Send an error as the last response."""
        error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
        self._send(pb_utils.InferenceResponse([], error), final=True)

    def finish(self) -> None:
        """Say that there is nothing more to come, if that was not said."""
        with self._lock:
            if not self._done:
                self._done = True
                self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send(self, response: "pb_utils.InferenceResponse", *, final: bool) -> None:
        with self._lock:
            if self._done:
                return
            self._done = final
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


def flag_of(inputs: Mapping[str, np.ndarray], name: str, default: bool) -> bool:
    """A boolean input."""
    value = inputs.get(name)
    return default if value is None or value.size == 0 else bool(value.flat[0])


def texts_of(inputs: Mapping[str, np.ndarray], name: str) -> list[str]:
    """The strings of an input; none where it is absent. Raises RequestFailed for bytes that are not UTF-8."""
    value = inputs.get(name)
    if value is None:
        return []
    try:
        return [item.decode() if isinstance(item, bytes) else str(item) for item in value.flat]
    except UnicodeDecodeError as error:
        raise RequestFailed(f"{name} is not UTF-8: {error}") from None
