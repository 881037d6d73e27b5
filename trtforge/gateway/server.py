"""The gateway as a server: listens, and on a stop lets running requests finish."""

import asyncio
import errno
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from trtforge.core.api_keys import ApiKeys, read_key_file
from trtforge.core.errors import ForgeError
from trtforge.core.host_check import HostCheck
from trtforge.gateway.app import make_app
from trtforge.gateway.config import GatewayConfig
from trtforge.gateway.disaggregated import Disaggregated
from trtforge.gateway.kserve import KServeBackend
from trtforge.gateway.protocol import HEAD_BYTES, BoundedProtocol
from trtforge.gateway.router import Router
from trtforge.gateway.service import Service
from trtforge.machine.interruptions import heeded, leave_lost_terminal
from trtforge.machine.processes import handled, raise_open_file_limit

_WAITING_CONNECTIONS = 2048
_IDLE_SECONDS = 60
_MOST_CONNECTIONS = 4096


class _Server(uvicorn.Server):
    """uvicorn's server, which would otherwise end this process with the signal that stopped it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with handled((signal.SIGTERM, signal.SIGINT, *heeded((signal.SIGHUP,))), self._stop):
            yield

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_lost_terminal()
        self.handle_exit(number, frame)


def run(config: GatewayConfig, on_listening: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Raises ForgeError if it cannot listen or read the keys."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="gateway: %(message)s")
    keys = None if config.api_key_file is None else ApiKeys(read_key_file(config.api_key_file))
    listening = _listening(config)
    backends = [KServeBackend(address, config.models) for address in config.backends]
    contexts = [KServeBackend(address, config.models) for address in config.context_backends]
    names = config.served_model_name, config.adapters
    router = Disaggregated(backends, contexts, *names) if contexts else Router(backends, *names)
    hosts = HostCheck.of(config.host, config.allowed_hosts, with_keys=keys is not None)
    options = uvicorn.Config(
        make_app(Service(router, keys, hosts=hosts, reasoning=config.reasoning_parser)),
        http=BoundedProtocol,
        h11_max_incomplete_event_size=HEAD_BYTES,
        limit_concurrency=min(_MOST_CONNECTIONS, raise_open_file_limit() // 2),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level=logging.ERROR,  # its warnings are about clients' data and would fill the log
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout),
    )
    if on_listening is not None:
        on_listening()
    loop = _new_loop()
    asyncio.set_event_loop(loop)
    with listening:
        loop.run_until_complete(_serve(_Server(options), listening, router))
    loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop if installed: it needs half the time for each event of a stream."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(server: uvicorn.Server, listening: socket.socket, router: Router) -> None:
    await server.serve(sockets=[listening])
    await router.close()


def _listening(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=_WAITING_CONNECTIONS)
    except OSError as error:
        hint = "Stop the process that listens there, or choose another port."
        foreign = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise ForgeError(
            f"the gateway cannot listen on {config.host}:{config.port}: {error.strerror or error}",
            hint="Give --host an address of this machine." if foreign else hint,
        ) from None
