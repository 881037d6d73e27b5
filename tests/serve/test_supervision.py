"""Starting and ending: what `trtforge serve` says, and that nothing stays when it is gone."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import torch_engine
from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from tests.serve.conftest import Running, Start, left_behind, package_with_fake_engine
from trtforge.core.errors import ForgeError
from trtforge.machine.processes import session_processes
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve.client import Sampling, generate, stream_text
from trtforge.serve.config import ServeConfig
from trtforge.serve.stage import require_free_ports, serve


def is_free(address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address.split(":")[0], int(address.split(":")[1]))) != 0


def assert_nothing_left(server: Running, triton: int) -> None:
    assert not session_processes(triton)
    assert all(is_free(address) for address in (server.http, server.grpc, server.metrics))
    assert left_behind(server.process.pid) == []


def test_sigterm_drains_and_leaves_nothing(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository, drain_timeout=PATIENCE)
    server.wait_ready()
    triton = server.triton()
    pieces = stream_text(server.grpc, "ensemble", "one two three", Sampling(max_tokens=200))
    first = next(pieces)
    server.process.send_signal(signal.SIGTERM)
    assert len((first + "".join(pieces)).split()) > 50
    assert server.process.wait(timeout=PATIENCE) == 0
    assert_nothing_left(server, triton)


def test_a_lost_model_process_ends_the_server(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository)
    server.wait_ready()
    triton = server.triton()
    model = server.model_process("tensorrt_llm")
    os.kill(model, signal.SIGKILL)
    assert server.process.wait(timeout=PATIENCE) == 1
    assert f"error: the process of model tensorrt_llm (process {model}) ended" in server.process.communicate()[1]
    assert_nothing_left(server, triton)


def test_a_killed_engine_is_said_to_have_had_too_little_memory(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository)
    server.wait_ready()
    triton = server.triton()
    (engine,) = (
        process
        for process in session_processes(triton)
        if b"fake_engine.py" in Path(f"/proc/{process}/cmdline").read_bytes()
    )
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(timeout=PATIENCE) == 1
    said = server.process.communicate()[1].splitlines()
    assert f"error: the engine process (process {engine}) ended:" in said, said
    at = said.index(f"error: the engine process (process {engine}) ended:")
    assert said[at + 1] == "the engine process was killed, probably because memory ran out"
    assert said[at + 2].startswith("hint: Give it more memory (the limit of the container), or serve less")
    assert_nothing_left(server, triton)


def test_clients_are_told_of_a_triton_that_hangs(fake_repository: Path, start: Start) -> None:
    """The front goes on until it has answered those whose requests never reached the engine."""
    server = start(fake_repository)
    server.wait_ready()
    url = f"http://{server.http}/v2/models/ensemble/generate"
    os.kill(server.triton(), signal.SIGSTOP)

    def ask(_: int) -> tuple[int, str]:
        answer = httpx.post(url, json={"text_input": "one two", "max_tokens": 5}, timeout=PATIENCE)
        return answer.status_code, answer.json()["error"]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {(502, "UNAVAILABLE: the server ended the request without an answer")}
    assert server.process.wait(timeout=PATIENCE) == 1
    assert "is stopped" in server.process.communicate()[1]


def test_killed_launcher_takes_the_server_along(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository)
    server.wait_ready()
    triton = server.triton()
    server.process.kill()
    server.process.wait()
    assert eventually(lambda: not session_processes(triton))
    assert all(is_free(address) for address in (server.http, server.grpc, server.metrics))


def test_streaming_off_serves_whole_answers_and_a_bounded_queue(tmp_path: Path, start: Start, slow: Path) -> None:
    config = PackageConfig.parse({"serving": {"streaming": False, "max_queue_size": 2}, "name_prefix": "my-"}, "test")
    server = start(package_with_fake_engine(tmp_path, config))
    server.wait_ready()
    answer = generate(server.http, "my-ensemble", "one two", Sampling(max_tokens=5), protocol="http")
    assert answer.text.startswith("one two")
    for url, protocol in ((server.grpc, "grpc"), (server.http, "http")):  # a stream of one piece, as it has no others
        pieces: list[str] = []
        asked = "my-ensemble", "one two", Sampling(max_tokens=5)
        streamed = generate(url, *asked, protocol=protocol, stream=True, on_text=pieces.append)
        assert pieces == [streamed.text] == [answer.text]

    def ask(number: int) -> str:
        try:
            return generate(server.grpc, "my-ensemble", "one two", Sampling(max_tokens=400)).text
        except ForgeError as error:
            return error.message

    with ThreadPoolExecutor(80) as pool:
        answers = [pool.submit(ask, number) for number in range(80)]
        refused = {done.result() for done in islice(as_completed(answers), 80 - 66)}
        slow.unlink()
    full = "UNAVAILABLE: the queue is full: 66 sequences run or wait, at most 66 may"
    assert all(full in answer for answer in refused)
    assert len({answer.result() for answer in answers} - refused) == 1


def test_engine_that_does_not_load_shows_its_own_error(tmp_path: Path, start: Start) -> None:
    files = {"rank0.safetensors": b"weights", "broken": b""}
    server = start(package_with_fake_engine(tmp_path, PackageConfig(), files))
    assert server.process.wait(timeout=PATIENCE) == 1
    errors = server.process.communicate()[1]
    assert "the Triton server ended while starting with status" in errors
    assert "rank 0 ended: out of memory\nhint: Lower max_batch_size.\n" in errors
    assert left_behind(server.process.pid) == []


def test_port_in_use_is_said_before_anything_starts(fake_repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        http, metrics = free_ports(2)
        config = ServeConfig(http_port=http, grpc_port=port, metrics_port=metrics)
        with pytest.raises(ForgeError, match=f"port in use: 127.0.0.1:{port}") as caught:
            serve(config, fake_repository)
    assert "--grpc-port" in caught.value.hint


def test_all_ports_in_use_are_said_at_once_with_free_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        first, last = one.getsockname()[1], other.getsockname()[1]
        config = ServeConfig(http_port=first, grpc_port=free_ports(1)[0], metrics_port=last)
        with pytest.raises(ForgeError) as caught:
            require_free_ports(config)
    assert caught.value.message == f"ports in use: 127.0.0.1:{first}, 127.0.0.1:{last}"
    repair = caught.value.repair
    assert repair is not None
    (option_one, port_one), (option_two, port_two) = repair.options
    assert (option_one, option_two) == ("--http-port", "--metrics-port")
    assert max(config.ports.values()) < int(port_one) < int(port_two)
    assert caught.value.hint.endswith(f"such as --http-port {port_one} --metrics-port {port_two}.")


def test_equal_ports_are_refused(fake_repository: Path) -> None:
    with pytest.raises(ForgeError, match="must differ"):
        serve(ServeConfig(http_port=8000, grpc_port=8000), fake_repository)


def test_damaged_repository_is_refused(tmp_path: Path) -> None:
    repository = package(PackageConfig(), torch_engine(tmp_path / "engine"), DEMO_MODEL, tmp_path / "out").path
    (repository / "ensemble" / "config.pbtxt").write_text("name: 'other'")
    with pytest.raises(ForgeError, match=r"repository .* is damaged: .*config.pbtxt"):
        serve(ServeConfig(), repository)


def test_dry_run_prints_the_command_and_leaves_nothing(
    fake_repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(ServeConfig(dry_run=True, http_port=9000, host="0.0.0.0"), fake_repository) == 0
    printed = capsys.readouterr().out
    assert "--http-address=unix:" in printed
    assert "--metrics-address=0.0.0.0" in printed
    assert "--host=0.0.0.0" in printed
    assert "--port=9000" in printed
    assert "trtforge-door=REPLACE_WITH_A_RANDOM_VALUE" in printed
    assert "LD_LIBRARY_PATH=" in printed
    assert left_behind(os.getpid()) == []
