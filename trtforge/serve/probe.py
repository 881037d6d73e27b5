"""Whether a server lives, has loaded its models and really generates: for launchers and container probes."""

from typing import Literal

import httpx

from trtforge.core.errors import ForgeError
from trtforge.serve.client import Sampling, generate
from trtforge.serve.http_client import HttpClient

Probe = Literal["startup", "live", "ready"]
_PROMPT = "Hello"
_PATHS: dict[Probe, str] = {"startup": "ready", "live": "live", "ready": "ready"}


def probe(kind: Probe, url: str = "127.0.0.1:8000", *, model: str = "ensemble", timeout: float = 10.0) -> None:
    """Return if the server at `url` (HTTP) is well, raise ForgeError if not.

    `live`: it answers; `startup`: all models are loaded; `ready`: and a token was generated just now.
    """
    status = health(url, _PATHS[kind], timeout)
    if status is None:
        raise ForgeError(f"no server answers at {url}", hint="Start one with `trtforge serve REPO`.")
    if status != httpx.codes.OK:
        raise ForgeError(f"the server at {url} is not {_PATHS[kind]} (HTTP {status})", hint="Wait, or read its log.")
    if kind == "ready":
        HttpClient(url, timeout=timeout).generate(model, _PROMPT, Sampling(max_tokens=1))


def is_serving(http: str, grpc: str, model: str, timeout: float) -> bool:
    """Whether the models are loaded and one token came over gRPC. Raises ForgeError if generating fails."""
    if health(http, "ready", min(timeout, 2.0)) != httpx.codes.OK:
        return False
    generate(grpc, model, _PROMPT, Sampling(max_tokens=1), timeout=timeout)
    return True


def health(url: str, what: str, timeout: float) -> int | None:
    """HTTP status of Triton's health endpoint `live` or `ready`; None if nobody answers."""
    try:
        return httpx.get(f"http://{url}/v2/health/{what}", timeout=timeout, trust_env=False).status_code
    except httpx.HTTPError:
        return None
