"""One request's interface to Triton: its inputs, its responses and its cancellation."""

import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

INVALID_ARGUMENT, UNAVAILABLE, INTERNAL = "INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL"
_CODES = {
    INVALID_ARGUMENT: "INVALID_ARG",
    UNAVAILABLE: "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",  # Triton has no code for it
    "CANCELLED": "CANCELLED",
    INTERNAL: "INTERNAL",
}
"""gRPC status to the name of Triton's error code."""


class RequestFailed(Exception):
    """Fails one request with this message and INVALID_ARGUMENT; other requests continue."""


class Responder:
    """Sends the responses of one request, from any thread.

    Inputs are copied, because Triton frees their memory when `execute` returns. `is_cancelled` on a finished request
    crashes the server with a segmentation fault (Triton 24.10), so it shares a lock with sending.
    """

    def __init__(self, request: "pb_utils.InferenceRequest") -> None:
        self.request_id: str = request.request_id()
        self.inputs: Mapping[str, NDArray[Any]] = {
            tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()
        }
        microseconds = request.timeout()
        self.timeout = microseconds / 1e6 if microseconds else None
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._done = False
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Whether the last response was sent."""
        return self._done

    def take_timeout(self, parameters: Mapping[str, object]) -> None:
        """Triton's generate endpoint makes an ordinary parameter of a timeout. Raises RequestFailed for a wrong one."""
        value = parameters.get("timeout", 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RequestFailed(f"timeout is {value!r}; it must be a whole number of microseconds")
        if value:
            self.timeout = value / 1e6

    def cancelled(self) -> bool:
        """Whether the client cancelled the request or disconnected."""
        with self._lock:
            if not self._done and not self._cancelled:
                self._cancelled = bool(self._sender.is_cancelled())
            return self._cancelled

    def send(self, outputs: Mapping[str, NDArray[Any]], *, final: bool = False) -> None:
        """Send a response; after the final one nothing more is sent."""
        tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items()]
        self._send(pb_utils.InferenceResponse(tensors), final=final)

    def fail(self, message: str, code: str = INVALID_ARGUMENT) -> None:
        """Send an error as the last response. Its text begins with the code: streams carry no per-request status."""
        self._send(pb_utils.InferenceResponse([], triton_error(message, code)), final=True)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Start the request in this block: an exception becomes the error that its client gets."""
        try:
            yield
        except RequestFailed as failure:
            self.fail(str(failure))
        except Exception:
            pb_utils.Logger.log_error(traceback.format_exc())
            self.fail("the request could not be started; the server's log has the reason", INTERNAL)

    def finish(self) -> None:
        """Send the final flag, unless it was already sent."""
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


def triton_error(message: str, code: str = INVALID_ARGUMENT) -> "pb_utils.TritonError":
    """Triton's error object for a message and gRPC status."""
    return pb_utils.TritonError(f"{code}: {message}", getattr(pb_utils.TritonError, _CODES[code]))
