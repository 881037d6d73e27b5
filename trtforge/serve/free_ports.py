"""Chooses free ports for those given as 0."""

import errno
import random
import socket
from contextlib import ExitStack

from trtforge.core.errors import ForgeError
from trtforge.machine.proc import ports_of_connections
from trtforge.serve.config import ServeConfig

_PORTS = ("http_port", "grpc_port", "metrics_port", "openai_port")
_LOWEST, _END = 10_000, 65_536
"""The range of ports to choose from; lower ports are customary for many other services."""


def ports_chosen(config: ServeConfig) -> dict[str, int]:
    """A free port of `config.host` for each of the configuration's ports that is 0. Raises ForgeError.

    The chosen ports differ from the given ones.
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
    """Different ports on which nothing listens. Raises OSError if `host` is no address of this machine.

    They are outside the kernel's ephemeral port range if that leaves ports above 10,000, so that no outgoing connection
    of another process takes one before the server listens on it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connections = ports_of_connections() or range(_LOWEST, _END)
    others = [port for port in range(_LOWEST, _END) if port not in connections]
    random.SystemRandom().shuffle(others)
    with ExitStack() as opened:
        ports: list[int] = []
        for port in [*others, *[0] * count]:
            if len(ports) == count:
                break
            each = opened.enter_context(socket.socket(family))
            try:
                each.bind((host, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                ports.append(each.getsockname()[1])
        return ports
