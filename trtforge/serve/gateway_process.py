"""The command that starts the gateway with OpenAI's API, and the choice of its port."""

import errno
import logging
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from trtforge.core.errors import UsageError
from trtforge.core.interpreter import module_arguments
from trtforge.core.packages import lacks_openai, require_openai
from trtforge.formats.triton import RepositoryFacts
from trtforge.serve.config import ServeConfig

_LOG = logging.getLogger(__name__)
_TRIED = 32  # ports tried above the others, before any free port
_DRAIN = 2  # seconds for answers in flight; the engine has been drained before


@dataclass(frozen=True)
class GatewayCommand:
    """The command that starts a gateway, with its address and that of Triton's gRPC. Contains no secret.

    `required`: the server fails without the gateway, because its port was given; else the server continues without it.
    """

    host: str
    port: int
    backend: str
    model: str
    api_key_file: Path | None = None
    required: bool = True
    adapters: tuple[tuple[str, int], ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    reasoning_parser: str | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return (
            *(sys.executable, *module_arguments("trtforge.gateway"), "--wait"),
            *(f"--host={self.host}", f"--port={self.port}", f"--backend={self.backend}", f"--model={self.model}"),
            *(f"--adapter={name}:{task}" for name, task in self.adapters),
            f"--drain-timeout={_DRAIN}",
            *((f"--api-key-file={self.api_key_file}",) if self.api_key_file is not None else ()),
            *(f"--allow-host={name}" for name in self.allowed_hosts),
            *((f"--reasoning-parser={self.reasoning_parser}",) if self.reasoning_parser is not None else ()),
        )


def gateway_command(config: ServeConfig, facts: RepositoryFacts, *, required: bool) -> GatewayCommand | None:
    """The gateway of a server; None if it has none. `required`: see GatewayCommand."""
    if not config.openai or config.openai_port is None:
        return None
    keys = None if config.api_key_file is None else config.api_key_file.absolute()
    model = facts.model("ensemble")
    adapters = tuple(sorted(facts.adapters.items(), key=lambda each: each[1]))
    return GatewayCommand(
        config.host,
        config.openai_port,
        config.grpc_address,
        model,
        keys,
        required,
        adapters,
        config.allowed_hosts,
        config.reasoning_parser,
    )


@contextmanager
def with_openai_port(config: ServeConfig) -> Iterator[ServeConfig]:
    """`config` with the port of OpenAI's API chosen, or without that API if packages or (with a warning) a port are
    missing.

    A chosen port is reserved within the block; a dry run reserves none. Raises ForgeError if an option of that API is
    given and the packages are missing.
    """
    given = {"--openai-port": config.openai_port, "--reasoning-parser": config.reasoning_parser}
    option = next((name for name, value in given.items() if value is not None), None)
    if not config.openai and option is not None:
        raise UsageError(f"{option} and --no-openai exclude each other", hint="Leave one of them out.")
    if option is not None and config.launcher != "trtllm-serve":
        require_openai(option)
    if not config.openai or config.openai_port is not None:
        yield config
    elif lacks_openai() is not None:
        yield config.model_copy(update={"openai": False})
    else:
        with _kept_port(config) as port:
            if port is None:
                _LOG.warning("no port is free for OpenAI's API, so it is not served: choose a port with --openai-port")
            yield config.model_copy(update={"openai": port is not None, "openai_port": port})


@contextmanager
def _kept_port(config: ServeConfig) -> Iterator[int | None]:
    """Reserve the first free port above the others, else any free port, within the block; None: no port.

    In a dry run, and if the address cannot be bound for another reason, it is the first port above the others; the
    check of all ports then reports the reason.

    The socket is bound but does not listen. On Linux the gateway can bind the same port with SO_REUSEADDR, but so could
    another `trtforge serve`. Therefore a second socket is a lock: its abstract name is unique in the network namespace,
    like ports.
    """
    used = config.ports.values()
    if config.dry_run:
        yield _unused(used)
        return
    first = max(used) + 1
    for port in (*range(first, min(first + _TRIED, 65536)), *(0,) * _TRIED):
        with ExitStack() as sockets:
            try:
                chosen = _bound(config.host, port, sockets)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                chosen = _unused(used)
            yield chosen
            return
    yield None


def _bound(host: str, port: int, sockets: ExitStack) -> int:
    """Bind a socket and its lock; returns the port. Raises OSError if either is taken."""
    kept = sockets.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((host, port))
    chosen = int(kept.getsockname()[1])
    lock = sockets.enter_context(socket.socket(socket.AF_UNIX))
    lock.bind(f"\0trtforge-openai-{chosen}")
    return chosen


def _unused(used: Collection[int]) -> int:
    """The first port above `used`, or the highest unused port."""
    return next(port for port in chain(range(max(used) + 1, 65536), range(65535, 0, -1)) if port not in used)
