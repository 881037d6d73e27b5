"""Every process of a running server killed, stopped or asked to stop: noticed, named, and nothing left behind."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE, eventually
from tests.serve.conftest import Running, Start, left_behind
from tests.serve.test_supervision import assert_nothing_left
from trtforge.machine.processes import session_processes
from trtforge.serve.client import Sampling, generate

MODELS = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "preprocessing", "postprocessing")


def triton(server: Running) -> int:
    return server.triton()


def model(name: str) -> Callable[[Running], int]:
    return lambda server: server.model_process(name)


VICTIMS = [("triton", triton, "the Triton server")] + [
    (name, model(name), f"the process of model {name}") for name in MODELS
]
KILLED = [pytest.param(victim, said, signal.SIGKILL, id=f"{name}-killed") for name, victim, said in VICTIMS]
STOPPED = [pytest.param(victim, said, signal.SIGSTOP, id=f"{name}-stopped") for name, victim, said in VICTIMS[:2]]


def errors_of(server: Running, status: int) -> str:
    assert server.process.wait(timeout=PATIENCE) == status
    return str(server.process.communicate()[1])


@pytest.mark.parametrize(("victim", "name", "number"), KILLED + STOPPED)
def test_every_process_is_missed(
    fake_repository: Path, start: Start, victim: Callable[[Running], int], name: str, number: signal.Signals
) -> None:
    server = start(fake_repository)
    server.wait_ready()
    session, process = server.triton(), victim(server)
    os.kill(process, number)
    said = "ended" if number is signal.SIGKILL else "is stopped"
    assert f"error: {name} (process {process}) {said}" in errors_of(server, 1)
    assert_nothing_left(server, session)


def test_a_lost_reaper_disturbs_nobody_and_is_replaced(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository)
    server.wait_ready()
    session, first = server.triton(), server.child("trtforge.serve.reap")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: server.child("trtforge.serve.reap") not in (None, first))
    server.process.kill()
    server.process.wait()
    assert eventually(lambda: not session_processes(session) and left_behind(server.process.pid) == [])


def test_a_launcher_that_was_stopped_blames_nobody(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository)
    server.wait_ready()
    os.kill(server.process.pid, signal.SIGSTOP)
    time.sleep(11)  # more than the watchdog's limits
    os.kill(server.process.pid, signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(timeout=3)
    server.process.terminate()
    assert server.process.wait(timeout=PATIENCE) == 0


def test_a_signal_while_starting_ends_it(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository)
    assert eventually(lambda: server.child("tritonserver") is not None)
    session = server.triton()
    server.process.send_signal(signal.SIGTERM)
    assert errors_of(server, 0).endswith("stopped before it was ready\n")
    assert_nothing_left(server, session)


def test_a_broken_server_starts_again_on_the_same_ports(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository, restart="on-failure")
    server.wait_ready()
    first = server.triton()
    os.kill(server.model_process("tensorrt_llm"), signal.SIGKILL)
    server.wait_ready()
    second = server.triton()
    assert second != first
    assert not session_processes(first)
    assert generate(server.grpc, "ensemble", "one two", Sampling(max_tokens=2)).output_tokens == 2
    server.process.send_signal(signal.SIGTERM)
    said = errors_of(server, 0)
    assert "restarting in 1 s: the process of model tensorrt_llm" in said
    assert said.splitlines()[-1].startswith("stopped")
    assert_nothing_left(server, second)


def test_a_connection_that_is_kept_open_does_not_hold_up_the_end(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository, drain_timeout=1)
    server.wait_ready()
    session = server.triton()
    with httpx.Client(base_url=f"http://{server.http}", trust_env=False, timeout=PATIENCE) as client:
        assert client.get("/v2/health/live").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=PATIENCE) in (0, 1)
    assert_nothing_left(server, session)
