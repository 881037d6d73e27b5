"""A gateway on a free port of this process, over backends that the test chooses."""

import asyncio
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from tests.patience import PATIENCE, eventually
from trtforge.core.api_keys import ApiKeys
from trtforge.core.host_check import HostCheck
from trtforge.core.reasoning import ReasoningParser
from trtforge.gateway.app import make_app
from trtforge.gateway.backend import Backend
from trtforge.gateway.limits import GatewayLimits
from trtforge.gateway.protocol import HEAD_BYTES, BoundedProtocol
from trtforge.gateway.router import Router
from trtforge.gateway.service import Service


@dataclass(frozen=True)
class Gateway:
    """A gateway that listens on `port`; `connections`: those that it holds."""

    port: int
    service: Service
    connections: Set[object]

    @property
    def root(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.root}/v1"

    def post(self, path: str, content: bytes | str | None = None, **json: object) -> httpx.Response:
        """The answer to a POST of JSON, or of `content`."""
        url = f"{self.url}/{path}"
        if content is not None:
            return httpx.post(url, content=content, timeout=PATIENCE)
        return httpx.post(url, json=json, timeout=PATIENCE)


@contextmanager
def running(
    backends: Sequence[Backend],
    *,
    keys: ApiKeys | None = None,
    limits: GatewayLimits | None = None,
    served_name: str | None = None,
    hosts: HostCheck | None = None,
    connections: int | None = None,
    reasoning: ReasoningParser | None = None,
) -> Iterator[Gateway]:
    """A gateway that answers meanwhile."""
    service = Service(Router(backends, served_name), keys, limits, hosts, reasoning)
    options = uvicorn.Config(
        make_app(service), port=0, http=BoundedProtocol, lifespan="off", log_level="warning", ws="none"
    )
    options.h11_max_incomplete_event_size = HEAD_BYTES
    options.limit_concurrency = connections
    server = uvicorn.Server(options)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    assert eventually(lambda: server.started)
    try:
        yield Gateway(server.servers[0].sockets[0].getsockname()[1], service, server.server_state.connections)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
