"""How the gateway with OpenAI's API is started, and the port that it gets."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.packages import lacks_openai, require_openai
from trtforge.serve.config import ServeConfig

_TRIED = 32  # ports above the others, before any free one
_DRAIN = 2  # seconds for answers in flight: the engine was drained before


@dataclass(frozen=True)
class GatewayCommand:
    """The command that starts a gateway: where it and Triton's gRPC listen. Holds no secret."""

    host: str
    port: int
    backend: str
    model: str
    api_key_file: Path | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return (
            *(sys.executable, "-m", "trtforge.gateway", "--wait"),
            *(f"--host={self.host}", f"--port={self.port}", f"--backend={self.backend}", f"--model={self.model}"),
            f"--drain-timeout={_DRAIN}",
            *((f"--api-key-file={self.api_key_file}",) if self.api_key_file is not None else ()),
        )


def gateway_command(config: ServeConfig, model: str) -> GatewayCommand | None:
    """The gateway of a server; None if it has none. `model`: the text model."""
    if not config.openai or config.openai_port is None:
        return None
    keys = None if config.api_key_file is None else config.api_key_file.absolute()
    return GatewayCommand(config.host, config.openai_port, config.grpc_address, model, keys)


@contextmanager
def with_openai_port(config: ServeConfig) -> Iterator[ServeConfig]:
    """`config` with the port of OpenAI's API settled, or without that API if its packages are not installed.

    A port that was chosen here is kept from other programs within the block. Raises ForgeError if a port is given and
    the packages are missing.
    """
    if not config.openai and config.openai_port is not None:
        raise UsageError("--openai-port and --no-openai exclude each other", hint="Leave one of them out.")
    if config.openai_port is not None:
        require_openai("--openai-port")
    if not config.openai or config.openai_port is not None:
        yield config
    elif lacks_openai() is not None:
        yield config.model_copy(update={"openai": False})
    else:
        with _kept_port(config) as port:
            yield config.model_copy(update={"openai_port": port})


@contextmanager
def _kept_port(config: ServeConfig) -> Iterator[int]:
    """The first free port above the others, else any, which no other `trtforge serve` chooses meanwhile.

    The socket is bound and does not listen: on Linux the gateway can bind the same port, with SO_REUSEADDR as here,
    and so could another `trtforge serve`. Hence a second one, whose abstract name belongs to the network namespace as
    ports do.
    """
    first = max(config.ports.values()) + 1
    for port in (*range(first, min(first + _TRIED, 65536)), *(0,) * _TRIED):
        with (
            socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as kept,
            socket.socket(socket.AF_UNIX) as lock,
        ):
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                kept.bind((config.host, port))
                chosen = int(kept.getsockname()[1])
                lock.bind(f"\0trtforge-openai-{chosen}")
            except OSError:
                continue
            yield chosen
            return
    raise ForgeError("no port is free for OpenAI's API", hint="Choose one with --openai-port, or add --no-openai.")


def listens(host: str, port: int) -> bool:
    """Whether a program accepts connections there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0
