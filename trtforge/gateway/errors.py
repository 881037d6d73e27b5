"""Errors in OpenAI's format, with the statuses that its clients map to exception classes."""

import json
import re
from dataclasses import dataclass, fields
from http import HTTPStatus

from trtforge.core.server_errors import (
    HTTP_STATUS,
    TRITON_QUEUE_FULL,
    retry_seconds,
    without_code,
    without_paths,
)
from trtforge.gateway.backend import GONE, BackendError
from trtforge.gateway.request import Sampling

_RETRY_SECONDS = 1
_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "request_forbidden",
    HTTPStatus.NOT_FOUND: "invalid_request_error",
    HTTPStatus.METHOD_NOT_ALLOWED: "invalid_request_error",
    HTTPStatus.REQUEST_TIMEOUT: "invalid_request_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "invalid_request_error",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "invalid_request_error",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "invalid_request_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_BUSY = ("queue is full", TRITON_QUEUE_FULL, "too many ")
_FIELDS = {"num_return_sequences": "n", "stop_words": "stop", "random_seed": "seed"}
"""Tensors of text models whose names differ from the request's fields."""
_PROMPTS = ("text_input", "input_ids", "messages")
_NAMES = frozenset((*_FIELDS, *_PROMPTS, "max_tokens", *(each.name for each in fields(Sampling))))
_FIRST_WORD = re.compile(r"\w+")
_TOO_LONG = re.compile(
    r"the prompt has \d+ tokens|characters for this engine|too long for this engine|tokens of KV cache, which holds"
)


@dataclass(frozen=True)
class AskedBy:
    """The names of a request's fields for its `prompt` and its `guide`; empty: none."""

    prompt: str = ""
    guide: str = ""


class ApiError(Exception):
    """The client gets `status` and an object with message, type, `param` and `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The JSON of the error."""
        kind = _TYPES.get(HTTPStatus(self.status), "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that must be corrected (400)."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def too_busy(message: str, seconds: int) -> ApiError:
    """A refusal for load (429) with Retry-After."""
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS, message, code="rate_limit_exceeded", headers={"retry-after": str(seconds)}
    )


def unknown_model(name: str) -> ApiError:
    """A model that is not served (404)."""
    message = f"the model {name[:100]!r} does not exist; GET /v1/models lists the models"
    return ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")


def of_backend(error: BackendError, asked: AskedBy | None = None) -> ApiError:
    """The client's error for a backend's error: 429 for a full queue, 503 for a server that is gone."""
    message = without_paths(without_code(error.message))
    if error.code == GONE:
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="server_unavailable", headers=_after(message))
    if error.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
        if any(said in message for said in _BUSY):
            return too_busy(message, retry_seconds(message, _RETRY_SECONDS))
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="server_unavailable", headers=_after(message))
    if error.code == "INVALID_ARGUMENT":
        return _refused(message, asked or AskedBy())
    if error.code == "NOT_FOUND":
        return ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
    status = HTTP_STATUS.get(error.code or "", HTTPStatus.INTERNAL_SERVER_ERROR)
    return ApiError(status, message)


def _refused(message: str, asked: AskedBy) -> ApiError:
    """The error for a request that the backend refuses, with the names of the request's fields."""
    if _TOO_LONG.search(message):
        # Clients (LiteLLM) recognise the error by these words.
        text = f"this model's maximum context length is exceeded: {message}"
        return bad_request(text, asked.prompt or None, "context_length_exceeded")
    if message.startswith("the guide "):
        return bad_request(message, asked.guide or None)
    found = _FIRST_WORD.match(message)
    name = found[0] if found else ""
    if name not in _NAMES:
        return bad_request(message)
    field = asked.prompt or name if name in _PROMPTS else _FIELDS.get(name, name)
    return bad_request(field + message[len(name) :], field)


def _after(message: str) -> dict[str, str]:
    return {"retry-after": str(retry_seconds(message, _RETRY_SECONDS))}
