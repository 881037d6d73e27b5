"""Free ports in place of those that are asked for as 0."""

import socket
from contextlib import ExitStack

from trtforge.core.errors import ForgeError
from trtforge.serve.config import ServeConfig

_PORTS = ("http_port", "grpc_port", "metrics_port", "openai_port")


def ports_chosen(config: ServeConfig) -> dict[str, int]:
    """A free port of `config.host` for each of the configuration's ports that is 0. Raises ForgeError.

    None is one that is asked for, which may lie in the range that the system chooses from.
    """
    names = [name for name in _PORTS if getattr(config, name) == 0]
    if names and config.launcher == "slurm":
        raise ForgeError(
            "port 0 asks for a free port of this machine; --launcher slurm prints a script for other machines",
            hint=f"Give --{names[0].replace('_', '-')} another number.",
        )
    given = set(config.ports.values()) - {0}
    try:
        free = free_ports(config.host, len(names) + len(given)) if names else []
        return dict(zip(names, (port for port in free if port not in given), strict=False))
    except OSError as error:
        raise ForgeError(
            f"cannot listen on {config.host} ({error.strerror})", hint="Give --host an address of this machine."
        ) from None


def free_ports(host: str, count: int) -> list[int]:
    """Different ports on which nothing listens. Raises OSError if `host` is no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket(family)) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
