"""Which Host and Origin headers a server on loopback without API keys accepts, and when it looks at them."""

import socket

import pytest

from trtforge.core.errors import ForgeError
from trtforge.core.host_check import HostCheck, unheeded_names
from trtforge.gateway.config import GatewayConfig
from trtforge.serve.config import ServeConfig


def refused(allowed: tuple[str, ...] = (), **headers: str) -> str | None:
    """Why a server on 127.0.0.1 refuses a request with these headers."""
    check = HostCheck.of("127.0.0.1", allowed, with_keys=False)
    assert check is not None
    return check.why_refused({name.encode(): value.encode("latin-1") for name, value in headers.items()})


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.2", "::1", "localhost", "models.localhost"),
        *("LOCALHOST", "localhost.", "Models.Localhost", "::ffff:127.0.0.1", "127.1", "0x7f000001"),
    ],
)
def test_servers_on_loopback_without_keys_look(host: str) -> None:
    assert HostCheck.of(host, (), with_keys=False) is not None
    assert HostCheck.of(host, (), with_keys=True) is None


def test_a_name_of_loopback_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a machine's own name 127.0.1.1 in /etc/hosts. A name that also has another address is reachable."""
    addresses = {"gpu1": ["127.0.1.1"], "gpu2": ["127.0.0.1", "10.0.0.7"]}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (each, 0)) for each in addresses[host]]
    )
    check = HostCheck.of("gpu1", (), with_keys=False)
    assert check is not None
    assert check.why_refused({b"host": b"gpu1:8000"}) is None
    assert check.why_refused({b"host": b"evil.example"}) is not None
    assert HostCheck.of("gpu2", (), with_keys=False) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu1", "2001:db8::1"])
def test_servers_that_other_machines_reach_do_not(host: str) -> None:
    """Containers and pods listen on all interfaces; their clients use names of services."""
    assert HostCheck.of(host, (), with_keys=False) is None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8003",
        "127.0.0.1",
        "localhost:8003",
        "LocalHost",
        "localhost.:8003",
        "models.localhost:1",
        "[::1]:8003",
        "[::1]",
        "10.1.2.3:8000",  # a forwarded port
        "host.docker.internal:8003",
        "",
    ],
)
def test_hosts_of_this_machine(host: str) -> None:
    assert refused(host=host) is None


def test_a_client_without_host_is_no_browser() -> None:
    assert refused() is None


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("evil.example:8003", "evil.example"),
        ("localhost.evil.example", "localhost.evil.example"),
        ("notlocalhost", "notlocalhost"),
        ("127.0.0.1.evil.example", "127.0.0.1.evil.example"),
        ("localhost:80@evil.example", "localhost:80@evil.example"),
        ("EVIL.example.", "evil.example"),
        ("evil\xe9.example", "evil\xe9.example"),
    ],
)
def test_hosts_of_others_are_refused(host: str, shown: str) -> None:
    said = refused(host=host)
    assert said is not None
    assert said.startswith(f"the Host {shown!r} is not allowed: this server listens on loopback without API keys, ")


def test_the_option_that_allows_a_name_is_said() -> None:
    assert "; --allow-host evil.example allows this one, --api-key-file " in str(refused(host="evil.example:1"))
    assert "allows this one" not in str(refused(host="evil example"))
    assert "allows this one" not in str(refused(host="a" * 300))
    assert len(str(refused(host="a" * 10_000))) < 500


@pytest.mark.parametrize(
    ("host", "allowed", "with_keys", "said"),
    [
        ("127.0.0.1", ("llm.example",), False, None),
        ("localhost", ("llm.example",), False, None),
        ("0.0.0.0", (), True, None),
        ("127.0.0.1", ("llm.example",), True, "with API keys clients may use every host name"),
        ("0.0.0.0", ("a", "b"), False, "on 0.0.0.0, which other machines reach, clients may use every host name"),
    ],
)
def test_names_that_change_nothing_are_warned_of(
    host: str, allowed: tuple[str, ...], with_keys: bool, said: str | None
) -> None:
    expected = None if said is None else f"--allow-host has no effect: {said}"
    assert unheeded_names(host, allowed, with_keys=with_keys) == expected


@pytest.mark.parametrize("name", ["llm.example", "LLM.example"])
def test_names_can_be_allowed(name: str) -> None:
    assert refused((name,), host="llm.example:443", origin="https://llm.example") is None
    assert refused((name,), host="other.llm.example") is not None


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://127.0.0.1:8443",
        "http://[::1]:5173",
        "chrome-extension://abcdefgh",
        "vscode-webview://x",
        "app://obsidian.md",
    ],
)
def test_pages_of_this_machine_and_programs_may_ask(origin: str) -> None:
    assert refused(host="127.0.0.1:8003", origin=origin) is None


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://203.0.113.5", "null", "https://", "HTTPS://EVIL.example:8003"]
)
def test_pages_of_others_may_not(origin: str) -> None:
    said = refused(host="127.0.0.1:8003", origin=origin)
    assert said is not None
    assert said.startswith(f"requests of web pages from {origin.lower()!r} are not allowed: this server listens on ")


def test_a_page_that_the_same_address_served_may_ask() -> None:
    assert refused(host="10.1.2.3:8003", origin="http://10.1.2.3:3000") is None


@pytest.mark.parametrize("wrong", ["http://a", "a:80", "*", "", "a b", "-a"])
def test_names_are_checked(wrong: str) -> None:
    for parse in (
        lambda: GatewayConfig.parse({"backends": ("a:1",), "allowed_hosts": (wrong,)}, "gateway"),
        lambda: ServeConfig.parse({"allowed_hosts": (wrong,)}, "serve"),
    ):
        with pytest.raises(ForgeError, match="is not a host name, without scheme and port"):
            parse()
