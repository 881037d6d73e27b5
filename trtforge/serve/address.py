"""The address on which a server listens: TCP or a Unix socket."""

from dataclasses import dataclass

_UNIX = "unix:"
LAST_PORT = 65535


@dataclass(frozen=True)
class Address:
    """The path of a Unix socket, or a host and port."""

    path: str | None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "Address":
        """`unix:/PATH` or `HOST:PORT`. Raises ValueError for anything else."""
        if text.startswith(_UNIX):
            return cls(path=text.removeprefix(_UNIX))
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"{text!r} is neither HOST:PORT nor unix:/PATH")
        if int(port) > LAST_PORT:  # getaddrinfo would use only its lowest 16 bits
            raise ValueError(f"port {port} does not exist, ports end at {LAST_PORT}")
        return cls(path=None, host=host.strip("[]"), port=int(port))
