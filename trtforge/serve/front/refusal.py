"""The error with which a request is answered, and its JSON."""

import json
from http import HTTPStatus
from typing import NoReturn


class Refusal(Exception):
    """Raised anywhere while a request is handled: the client gets `status` and `{"error": message}`."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or {}


def refuse(message: str) -> NoReturn:
    """Refuse a malformed request (400)."""
    raise Refusal(HTTPStatus.BAD_REQUEST, message)


def unavailable(message: str, retry_seconds: int) -> Refusal:
    """A refusal (503) with Retry-After."""
    text = f"UNAVAILABLE: {message}; retry in {retry_seconds} s"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, text, {"retry-after": str(retry_seconds)})


def error_body(message: str) -> bytes:
    """The JSON of an error, as Triton writes it."""
    return json.dumps({"error": message}, separators=(",", ":")).encode()
