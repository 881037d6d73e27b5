"""A port of 0 is any free one: chosen once, for the server and for whoever starts it."""

import pytest

from trtforge.core.errors import ForgeError
from trtforge.serve.config import ServeConfig
from trtforge.serve.free_ports import ports_chosen


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
