"""Whether a server is live, has loaded its models and generates tokens: for launchers and container probes."""

import time
from http import HTTPStatus
from typing import Literal

from trtforge.core.api_keys import key_needed
from trtforge.core.defaults import HTTP_URL
from trtforge.core.errors import ForgeError
from trtforge.core.server_errors import TRITON_NOT_LOADED
from trtforge.serve import plain_http
from trtforge.serve.client import Sampling, generate
from trtforge.serve.http_client import HttpClient
from trtforge.serve.request import Unavailable, not_loaded

Probe = Literal["startup", "live", "ready"]
_PROMPT = "Hello"
_PATHS: dict[Probe, str] = {"startup": "ready", "live": "live", "ready": "ready"}
_PING = {"text_input": "", "max_tokens": 1, "trtforge_ping": True}
"""Request that a text model answers after one iteration of the engine's loop, however many requests wait."""


def probe(kind: Probe, url: str = HTTP_URL, *, model: str = "ensemble", timeout: float = 10.0) -> None:
    """Raises ForgeError unless the server at `url` (HTTP) passes the probe. `timeout`: seconds for the whole probe.

    `live`: a request gets through to the engine and back; `startup`: all models are loaded; `ready`: all models are
    loaded and the probe's own request generated a token.
    """
    until = time.monotonic() + timeout
    status = plain_http.get(url, f"/v2/health/{_PATHS[kind]}", timeout).status
    if status != HTTPStatus.OK:
        raise ForgeError(f"the server at {url} is not {_PATHS[kind]} (HTTP {status})", hint="Wait, or look at its log.")
    left = max(0.1, until - time.monotonic())
    if kind == "ready":
        HttpClient(url, timeout=left).generate(model, _PROMPT, Sampling(max_tokens=1))
    elif kind == "live":
        ping(url, model, left)


def ping(url: str, model: str, timeout: float) -> None:
    """Send a request that generates nothing through text model and engine. Raises ForgeError if that fails.

    Older repositories refuse its empty prompt, which counts as an answer.
    """
    answer = send_ping(url, model, timeout)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        raise key_needed(url)
    if TRITON_NOT_LOADED in answer.text:
        raise not_loaded(answer.text)
    if "nknown model" in answer.text:
        raise ForgeError(f"the server at {url} has no model {model}", hint="Give the text model with --model.")
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise ForgeError(f"the server at {url} does not serve: {answer.text.strip()}", hint="Look at its log.")


def send_ping(url: str, model: str, timeout: float) -> plain_http.Answer:
    """The answer to the request of `ping`. Raises NoAnswer."""
    return plain_http.post(url, f"/v2/models/{model}/generate", _PING, timeout)


def is_serving(http: str, grpc: str, model: str, timeout: float) -> bool:
    """Whether the models are loaded and generate a token over gRPC. Raises ForgeError if generating fails.

    Not ready if a text model refuses with UNAVAILABLE, as it is not connected to the engine process yet.
    """
    if health(http, "ready", min(timeout, 2.0)) != HTTPStatus.OK:
        return False
    try:
        generate(grpc, model, _PROMPT, Sampling(max_tokens=1), timeout=timeout)
    except Unavailable:
        return False
    return True


def health(url: str, what: str, timeout: float) -> int | None:
    """HTTP status of Triton's health endpoint `live` or `ready`; None without an answer."""
    try:
        return plain_http.get(url, f"/v2/health/{what}", timeout).status
    except plain_http.NoAnswer:
        return None
