"""Triton's errors as HTTP errors: status by the text, Retry-After, without paths of this machine."""

import json
import re
from http import HTTPStatus

from trtforge.core.server_errors import (
    HTTP_STATUS,
    TRITON_NOT_LOADED,
    TRITON_QUEUE_FULL,
    TRITON_STOPPING,
    code_of,
    retry_seconds,
    without_paths,
)
from trtforge.serve.front.refusal import Refusal

_ERROR = b'{"error":'
_STREAM_ERROR = re.compile(rb"""\s*data: ?(\{"error": ?.*?\})\s*(?:\n|$)""", re.DOTALL)
_LATER = (TRITON_QUEUE_FULL, TRITON_NOT_LOADED, TRITON_STOPPING)
_WRONG = ("attempt to access JSON", "Unable to parse", "parameter key '", "explicit model load / unload is not allowed")
"""Texts of Triton's internal errors and 503 errors for requests that will also fail if retried."""


def as_refusal(status: int, body: bytes, retry: int) -> Refusal:
    """The client's error for Triton's error `body`. `retry`: Retry-After in seconds if the text has none."""
    message = without_paths(_message(body))
    code = code_of(message)
    if code is None and any(said in message for said in _LATER):
        message, status = f"UNAVAILABLE: {message}", HTTPStatus.SERVICE_UNAVAILABLE
    elif code is not None:
        status = HTTP_STATUS[code]
    elif any(said in message for said in _WRONG):
        status = HTTPStatus.BAD_REQUEST
    headers = {}
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        headers["retry-after"] = str(retry_seconds(message, retry))
    return Refusal(int(status), message or HTTPStatus(status).phrase, headers)


def stream_error(first: bytes) -> bytes | None:
    """The error object if server-sent events begin with one, None if they begin with an answer."""
    found = _STREAM_ERROR.match(first)
    return None if found is None else found[1]


def whole_error(first: bytes) -> bytes | None:
    """The JSON answer if it is an error, else None: Triton sends errors of a second response with status 200."""
    return first if first.startswith(_ERROR) else None


def _message(body: bytes) -> str:
    try:
        document = json.loads(stream_error(body) or body)
    except (ValueError, RecursionError):
        return ""
    message = document.get("error") if isinstance(document, dict) else None
    return message if isinstance(message, str) else ""
