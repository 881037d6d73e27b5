"""Error texts of our models: the gRPC code that they begin with, when to retry, and no paths of this machine."""

import math
import re
from http import HTTPStatus

HTTP_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""The status of an error over HTTP by its code."""

QUEUE_FULL = "the queue is full"
"""What every refusal of a full queue of trtforge's engines says."""
TRITON_QUEUE_FULL = "Exceeds maximum queue size"
"""Triton's own error when a model's queue is full; it has no code."""
TRITON_NOT_LOADED = "has no available versions"
"""What Triton says of a model that it knows and does not serve: it is unloaded when a server stops. No code."""
TRITON_STOPPING = "Server is stopping, scheduler for model has stopped accepting"
"""What Triton says of a request that comes between its signal and the unloading. No code."""

STREAMING_OFF = "packaged with streaming off"
"""What the text models of a repository that streams no answers say of a request for a stream."""

SHUTTING_DOWN = "the server is shutting down; retry in 5 s on another server"
"""The refusal of an engine that drains."""

_CODE = re.compile(rf"(?:^|message: |', )({'|'.join(HTTP_STATUS)}):")
_RETRY = re.compile(r"retry in (\d+(?:\.\d+)?) s")
_PATH = re.compile(r"(?<![\w./#])/(?!v[12]/)(?:[\w.+@~-]+/)+([\w.+@~-]+)")


def code_of(message: str) -> str | None:
    """The code of an error text, a key of HTTP_STATUS; None if it has none."""
    found = _CODE.search(message)
    return None if found is None else found[1]


def without_code(message: str) -> str:
    """The text after the code; the whole text if it has none."""
    found = _CODE.search(message)
    return message if found is None else message[found.end() :].strip()


def retry_seconds(message: str, default: int) -> int:
    """Whole seconds after which the text asks to retry."""
    told = _RETRY.search(message)
    return math.ceil(float(told[1])) if told else default


def without_paths(message: str) -> str:
    """`message` with absolute paths reduced to file names."""
    return _PATH.sub(r"\1", message)
