"""Which Host and Origin headers a loopback server without API keys accepts: those that no foreign web page can send.

A web page in a browser on the same machine can reach such a server in two ways: by a name of its own site that its DNS
server resolves to 127.0.0.1 (DNS rebinding), so that the browser also lets it read the answers; or by a POST with a
simple content type, which browsers send without a preflight request. Host reveals the first, Origin the second.
"""

import re
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated

from pydantic import AfterValidator

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?", re.ASCII)
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]*\]|[^:]*)(?::\d*)?")
_OF_CONTAINERS = ("host.docker.internal", "host.containers.internal")
"""Names by which containers reach their machine's loopback interface."""
_SHOWN = 100  # characters of a header in a message


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, an address or a name that always refers to loopback."""
    name = host.lower().removesuffix(".")
    address = _address(name)
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _require_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a host name, without scheme and port")
    return name


AllowedHost = Annotated[str, AfterValidator(_require_name)]
"""A host name that clients may use in addition to loopback names."""


@dataclass(frozen=True)
class HostCheck:
    """The check of one server; `names`: host names accepted in addition to loopback names, in lower case."""

    names: frozenset[str]

    @classmethod
    def of(cls, host: str, allowed: Iterable[str], *, with_keys: bool) -> "HostCheck | None":
        """The check of a server that listens on `host`: an address, or a name, which is looked up.

        None if every name is accepted: other machines reach the server, or it requires API keys, which pages do not
        have.
        """
        if with_keys or not (is_loopback(host) or _resolves_to_loopback(host)):
            return None
        return cls(frozenset((*_OF_CONTAINERS, host.lower().removesuffix("."), *(name.lower() for name in allowed))))

    def why_refused(self, headers: Mapping[bytes, bytes]) -> str | None:
        """None if the request may be from a program on this machine, else the reason. Header names are in lower case.

        A Host that is an IP address is accepted, because no DNS server chooses it; so is an Origin that no web page can
        have, as sent by browser extensions.
        """
        host = _name_in(headers.get(b"host", b""))
        if host and _address(host) is None and not self._is_ours(host):
            return _refusal(f"the Host {host[:_SHOWN]!r} is not allowed", host)
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        scheme, _, authority = origin.partition("://")
        if origin != "null" and scheme not in ("http", "https"):
            return None
        page = _name_in(authority.encode("latin-1"))
        if page and (page == host or self._is_ours(page)):
            return None
        return _refusal(f"requests of web pages from {origin[:_SHOWN]!r} are not allowed", page)

    def _is_ours(self, name: str) -> bool:
        return is_loopback(name) or name in self.names


def unheeded_names(host: str, allowed: Collection[str], *, with_keys: bool) -> str | None:
    """A warning if names of `--allow-host` have no effect, as every name is accepted; None otherwise."""
    if not allowed or HostCheck.of(host, (), with_keys=with_keys) is not None:
        return None
    why = "with API keys" if with_keys else f"on {host}, which other machines reach,"
    return f"--allow-host has no effect: {why} clients may use every host name"


def _resolves_to_loopback(host: str) -> bool:
    """Whether all addresses of `host` are loopback addresses, as for this machine's name in /etc/hosts or `127.1`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the server cannot listen there either
        return False
    return all(is_loopback(str(address[0])) for *_, address in found)


def _refusal(what: str, name: str) -> str:
    """The message, with the option that allows the name, if it can be allowed."""
    option = f"--allow-host {name} allows this one, " if _NAME.fullmatch(name) and len(name) <= _SHOWN else ""
    return (
        f"{what}: this server listens on loopback without API keys, so it answers only to localhost and IP addresses, "
        f"and not to web pages of other hosts; {option}--api-key-file requires keys instead"
    )


def _name_in(authority: bytes) -> str:
    """The host of HOST or HOST:PORT, in lower case; an IPv6 address without brackets."""
    text = authority.decode("latin-1").strip().lower()
    found = _AUTHORITY.fullmatch(text)
    return (text if found is None else found[1].strip("[]")).removesuffix(".")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
