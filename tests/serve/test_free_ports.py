"""A port of 0 is any free one: chosen once, for the server and for whoever starts it."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from trtforge.core.errors import ForgeError
from trtforge.serve.config import ServeConfig
from trtforge.serve.free_ports import free_ports, ports_chosen


def test_only_ports_of_zero_are_chosen_and_all_differ() -> None:
    assert ports_chosen(ServeConfig()) == {}
    chosen = ports_chosen(ServeConfig(http_port=0, grpc_port=0, metrics_port=9, openai_port=0))
    assert list(chosen) == ["http_port", "grpc_port", "openai_port"]
    assert len({*chosen.values(), 0}) == 4


def test_a_port_that_is_asked_for_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.serve.free_ports.free_ports", lambda _, count: list(range(40_000, 40_000 + count)))
    config = ServeConfig(http_port=0, grpc_port=40_000, metrics_port=40_002, openai_port=0)
    assert ports_chosen(config) == {"http_port": 40_001, "openai_port": 40_003}


@pytest.mark.parametrize("host", ["::1", "0.0.0.0", "localhost"])
def test_they_are_of_the_host(host: str) -> None:
    assert ports_chosen(ServeConfig(http_port=0, host=host))["http_port"] > 0


def test_a_host_of_another_machine_is_said() -> None:
    with pytest.raises(ForgeError, match=r"cannot listen on 192\.0\.2\.1 \(") as caught:
        ports_chosen(ServeConfig(http_port=0, host="192.0.2.1"))
    assert caught.value.hint == "Give --host an address of this machine."


def test_a_script_for_other_machines_needs_numbers() -> None:
    with pytest.raises(ForgeError, match="port 0 asks for a free port of this machine") as caught:
        ports_chosen(ServeConfig(grpc_port=0, launcher="slurm"))
    assert caught.value.hint == "Give --grpc-port another number."


def test_no_connection_of_another_process_is_given_one() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    chosen = free_ports("127.0.0.1", 200)
    assert len(set(chosen)) == 200
    assert all(10_000 <= port < first or last < port < 65_536 for port in chosen)


def test_ports_in_use_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.serve.free_ports.ports_of_connections", lambda: range(10_010, 65_536))
    with ExitStack() as opened:
        for port in range(10_000, 10_007):
            taken = opened.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            taken.listen()
        assert sorted(free_ports("127.0.0.1", 3)) == [10_007, 10_008, 10_009]
        assert max(free_ports("127.0.0.1", 4)) > 10_009  # the kernel's choice, where no others are left


def test_the_kernel_chooses_where_all_ports_are_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.serve.free_ports.ports_of_connections", lambda: range(1024, 65_536))
    chosen = free_ports("127.0.0.1", 5)
    assert len(set(chosen)) == 5
    assert all(port > 0 for port in chosen)
