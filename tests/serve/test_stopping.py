"""Stopping a server whose engine process tells what runs: requests finish, or are told that they were cut."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import PATIENCE, eventually
from tests.serve.conftest import Running, Start
from tests.serve.fake_engine import HANGING
from tests.serve.test_supervision import assert_nothing_left
from tests.serve.test_watching import errors_of
from trtforge.core.errors import ForgeError
from trtforge.engine_process.control import EngineControl
from trtforge.machine.processes import session_processes
from trtforge.serve.client import Sampling, generate, stream_text
from trtforge.serve.stopping import stop_request


def test_a_closed_terminal_asks_once_for_a_stop() -> None:
    """Its shell and the kernel both send SIGHUP; a second request would cut what drains."""
    with stop_request() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert (stop.asked, stop.again) == (True, None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.again == signal.SIGTERM


def engine_of(server: Running) -> EngineControl:
    """The control of a server's engine process."""
    words = Path(f"/proc/{server.triton()}/environ").read_bytes().split(b"\0")
    runtime = next(word for word in words if word.startswith(b"TRTFORGE_RUNTIME=")).partition(b"=")[2]
    return EngineControl(Path(os.fsdecode(runtime)) / "tensorrt_llm.sock")


def stream(server: Running, tokens: int, started: threading.Semaphore) -> str:
    """The text of one stream, or its error."""
    text = ""
    try:
        for piece in stream_text(server.grpc, "ensemble", "one two three", Sampling(max_tokens=tokens)):
            if not text:
                started.release()
            text += piece
    except ForgeError as error:
        return f"error: {error.message}"
    return text


def stop_with_streams(
    server: Running, count: int, tokens: int, number: signal.Signals, slow: Path | None = None
) -> list[str]:
    """What the streams got when the server is stopped while they all run. `slow` is removed once it drains."""
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(stream, server, tokens, started) for _ in range(count)]
        for _ in range(count):
            assert started.acquire(timeout=PATIENCE)
        control = engine_of(server)
        server.process.send_signal(number)
        if slow is not None:
            assert eventually(lambda: control.status().state == "draining")
            slow.unlink()
        return [answer.result() for answer in answers]


@pytest.mark.parametrize(("count", "number"), [(20, signal.SIGTERM), (50, signal.SIGINT)])
def test_streams_finish_while_draining(
    fake_repository: Path, start: Start, slow: Path, count: int, number: signal.Signals
) -> None:
    server = start(fake_repository, drain_timeout=PATIENCE)
    server.wait_ready()
    session = server.triton()
    answers = stop_with_streams(server, count, 400, number, slow)
    assert len(set(answers)) == 1
    assert answers[0].startswith("one two three")
    assert errors_of(server, 0).splitlines()[-1] == f"stopped: {count} requests finished while draining, 0 cut"
    assert_nothing_left(server, session)


@pytest.mark.parametrize("timeout", [0, 1])
def test_streams_that_take_too_long_are_told_and_counted(fake_repository: Path, start: Start, timeout: int) -> None:
    server = start(fake_repository, drain_timeout=timeout)
    server.wait_ready()
    session = server.triton()
    answers = stop_with_streams(server, 20, 1_000_000, signal.SIGTERM)
    expected = f"UNAVAILABLE: the server is stopping: its drain timeout of {timeout} s has passed"
    assert [answer for answer in answers if expected not in answer] == []
    assert errors_of(server, 1).splitlines()[-1] == "stopped: 0 requests finished while draining, 20 cut"
    assert_nothing_left(server, session)


def test_new_requests_are_refused_while_draining(fake_repository: Path, start: Start, slow: Path) -> None:
    server = start(fake_repository, drain_timeout=PATIENCE)
    server.wait_ready()
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, 400, started)
        assert started.acquire(timeout=PATIENCE)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: engine_of(server).status().state == "draining")
        with pytest.raises(ForgeError, match="UNAVAILABLE: the server is shutting down"):
            generate(server.grpc, "ensemble", "one", Sampling(max_tokens=1))
        slow.unlink()
        assert running.result().startswith("one two three")
    assert errors_of(server, 0).splitlines()[-1] == "stopped: 1 request finished while draining, 0 cut"


def test_a_second_signal_counts_what_it_cut(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository, drain_timeout=100)
    server.wait_ready()
    session = server.triton()
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream, server, 1_000_000, started) for _ in range(3)]
        for _ in streams:
            assert started.acquire(timeout=PATIENCE)
        control = engine_of(server)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: control.status().state == "draining")
        server.process.send_signal(signal.SIGINT)
        assert all(answer.result().startswith("error: ") for answer in streams)
    assert errors_of(server, 130).splitlines()[-1] == "stopped at once by a second SIGINT: 3 requests cut"
    assert_nothing_left(server, session)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_engine_process_is_missed(fake_repository: Path, start: Start, number: signal.Signals, busy: bool) -> None:
    server = start(fake_repository)
    server.wait_ready()
    session, engine = server.triton(), engine_of(server).status().pid
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, server, 1_000_000, started) for _ in range(4 if busy else 0)]
        for _ in streams:
            assert started.acquire(timeout=PATIENCE)
        os.kill(engine, number)
        assert all(answer.result().startswith("error: ") for answer in streams)
    said = "ended" if number is signal.SIGKILL else "is stopped"
    assert f"the engine process (process {engine}) {said}" in errors_of(server, 1)
    assert_nothing_left(server, session)
    assert not session_processes(engine)


def test_a_wedge_is_said_with_stacks_and_ends_the_server(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository)
    server.wait_ready()
    session = server.triton()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, server, HANGING, threading.Semaphore(0))
        said = errors_of(server, 1)
        assert answer.result().startswith("error: ")
    assert "error: no token was generated for 10 s while 1 requests run and 0 wait" in said
    assert "stacks of its model and engine processes follow" in said
    assert "threading.py" in said
    assert "fake_engine.py" in said  # where the engine's loop stands
    assert_nothing_left(server, session)
