"""The command that starts the front, and the address of Triton's own HTTP behind it."""

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.interpreter import module_arguments
from trtforge.launch.config import ServerConfig
from trtforge.launch.doors import new_secret
from trtforge.launch.server_arguments import Listening

_LONGEST_SOCKET_PATH = 100


@dataclass(frozen=True)
class FrontCommand:
    """The command that starts a front, with its address and that of Triton's own HTTP. Contains no secret."""

    host: str
    port: int
    upstream: str
    opened: tuple[str, ...] = ()
    api_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return (
            *(sys.executable, *module_arguments("trtforge.serve.front")),
            *(f"--host={self.host}", f"--port={self.port}", f"--upstream={self.upstream}"),
            *(f"--open={door}" for door in self.opened),
            *((f"--api-key-file={self.api_key_file}",) if self.api_key_file is not None else ()),
            *(f"--allow-host={name}" for name in self.allowed_hosts),
        )


def behind_front(config: ServerConfig, runtime: Path) -> tuple[Listening, FrontCommand]:
    """Triton's own addresses, and the front that clients reach."""
    upstream = private_http(runtime)
    keys = None if config.api_key_file is None else config.api_key_file.absolute()
    front = FrontCommand(config.host, config.http_port, upstream, config.open, keys, config.allowed_hosts)
    return Listening(http_arguments(upstream, config.http_port), new_secret(), direct=False), front


def private_http(runtime: Path) -> str:
    """Address of Triton's own HTTP: a Unix socket in the runtime directory, which only its user can access.

    A loopback port if the path is too long for a socket.
    """
    path = runtime / "http.sock"
    if len(str(path)) <= _LONGEST_SOCKET_PATH:
        return f"unix:{path}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def http_arguments(upstream: str, port: int) -> tuple[str, str]:
    """Triton's options for the address that `private_http` chose; `port` has no effect with a Unix socket."""
    if upstream.startswith("unix:"):
        return f"--http-address={upstream}", f"--http-port={port}"
    host, _, private = upstream.rpartition(":")
    return f"--http-address={host}", f"--http-port={private}"
