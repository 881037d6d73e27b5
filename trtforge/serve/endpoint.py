"""A server's address and protocol as given on a command line."""

from dataclasses import dataclass

from trtforge.core.defaults import GRPC_PORT, GRPC_URL, HTTP_PORT, HTTP_URL
from trtforge.core.errors import UsageError
from trtforge.serve.address import Address
from trtforge.serve.spoken import Protocol

_SCHEMES: dict[str, Protocol] = {"http://": "http", "grpc://": "grpc"}
_EXAMPLE = f"Give HOST:PORT, such as {HTTP_URL} for HTTP or {GRPC_URL} for gRPC."


@dataclass(frozen=True)
class Endpoint:
    """Where to send requests: HOST:PORT without scheme, or unix:PATH, and its protocol."""

    url: str
    protocol: Protocol

    @classmethod
    def of_grpc(cls, url: str | None) -> "Endpoint":
        """The endpoint of a command that speaks gRPC only, with the defaults of `of`. Raises UsageError."""
        if url is not None and url.startswith("http://"):
            raise UsageError(
                f"{url}: this command speaks gRPC, not HTTP",
                hint=f"Give the address of the server's gRPC endpoint as HOST:PORT (port {GRPC_PORT} by default).",
            )
        return cls.of(url, None)

    @classmethod
    def of_http(cls, url: str) -> "Endpoint":
        """The endpoint of a command that speaks HTTP only, with the defaults of `of`. Raises UsageError."""
        if url.startswith("grpc://"):
            raise UsageError(
                f"{url}: this command speaks HTTP, not gRPC",
                hint=f"Give the address of the server's HTTP endpoint as HOST:PORT (port {HTTP_PORT} by default).",
            )
        return cls.of(url, "http")

    @classmethod
    def of(cls, url: str | None, protocol: str | None) -> "Endpoint":
        """The endpoint of `--url` and `--protocol`; None: not given.

        Without an address or port, the protocol's defaults apply. A scheme (http:// or grpc://) chooses the protocol.
        Without either, the protocol is gRPC. Raises UsageError.
        """
        if protocol not in (None, "grpc", "http"):
            raise UsageError(f"--protocol {protocol}: neither grpc nor http", hint="Use --protocol grpc or http.")
        scheme = next((scheme for scheme in _SCHEMES if url is not None and url.startswith(scheme)), None)
        meant = _SCHEMES[scheme] if scheme else None
        if meant is not None and protocol not in (None, meant):
            raise UsageError(f"--url {url} with --protocol {protocol}", hint=f"Leave out --protocol or {scheme}.")
        chosen: Protocol = "http" if "http" in (protocol, meant) else "grpc"
        if url is None:
            return cls(HTTP_URL if chosen == "http" else GRPC_URL, chosen)
        if "://" in url and scheme is None:
            raise UsageError(f"--url {url}: servers speak HTTP and gRPC without TLS", hint=_EXAMPLE)
        rest = url.removeprefix(scheme or "").rstrip("/")
        if rest and not rest.startswith("unix:") and (":" not in rest or rest.endswith("]")):
            rest = f"{rest}:{HTTP_PORT if chosen == 'http' else GRPC_PORT}"
        try:
            Address.parse(rest)
        except ValueError:
            raise UsageError(f"--url {url}: not the address of a server", hint=_EXAMPLE) from None
        return cls(rest, chosen)
