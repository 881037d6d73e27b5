"""Triton's errors as HTTP errors: the status that the text implies, Retry-After, no paths of this machine."""

import json
import math
import re
from http import HTTPStatus

from trtforge.serve.front.refusal import Refusal

_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
}
_CODE = re.compile(rf"(?:^|message: |', )({'|'.join(_STATUS)}):")
_RETRY = re.compile(r"retry in (\d+(?:\.\d+)?) s")
_PATH = re.compile(r"(?<![\w./])/(?!v2/)(?:[\w.+@~-]+/)+([\w.+@~-]+)")
_STREAM_ERROR = re.compile(rb"""\s*data: ?(\{"error": ?.*?\})\s*(?:\n|$)""", re.DOTALL)
_WRONG_BODY = ("attempt to access JSON", "Unable to parse")


def as_refusal(status: int, body: bytes, retry_seconds: int) -> Refusal:
    """The client's error for Triton's error `body`."""
    message = without_paths(_message(body))
    code = _CODE.search(message)
    if code is None and "Exceeds maximum queue size" in message:
        message, status = f"UNAVAILABLE: {message}", HTTPStatus.SERVICE_UNAVAILABLE
    elif code is not None:
        status = _STATUS[code[1]]
    elif any(said in message for said in _WRONG_BODY):
        status = HTTPStatus.BAD_REQUEST
    headers = {}
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        told = _RETRY.search(message)
        headers["retry-after"] = str(math.ceil(float(told[1])) if told else retry_seconds)
    return Refusal(int(status), message or HTTPStatus(status).phrase, headers)


def stream_error(first: bytes) -> bytes | None:
    """The error object of server-sent events that begin with one, None if they begin with an answer."""
    found = _STREAM_ERROR.match(first)
    return None if found is None else found[1]


def without_paths(message: str) -> str:
    """`message` with absolute paths reduced to file names."""
    return _PATH.sub(r"\1", message)


def _message(body: bytes) -> str:
    try:
        document = json.loads(stream_error(body) or body)
    except (ValueError, RecursionError):
        return ""
    message = document.get("error") if isinstance(document, dict) else None
    return message if isinstance(message, str) else ""
