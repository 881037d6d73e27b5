"""OpenAI's API in `trtforge serve`: its port, its command, its lines of output, and what happens when it dies."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from tests.serve.conftest import Running, Start, left_behind
from trtforge.core import packages
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.extras import install_command
from trtforge.core.verified import open_to_run
from trtforge.formats.triton import RepositoryFacts, read_facts
from trtforge.machine.proc import listens
from trtforge.serve import gateway_process
from trtforge.serve.client import Sampling, generate
from trtforge.serve.config import ServeConfig
from trtforge.serve.first_steps import first_steps
from trtforge.serve.gateway_process import gateway_command, with_openai_port
from trtforge.serve.launchers import plan_launch
from trtforge.serve.stage import require_free_ports, require_open_files, serve

GATEWAY = "trtforge.gateway"
FACTS = RepositoryFacts(backend="torch", device="cpu", tensorrt_llm="1.2.1", world_size=1, engine_path="engine")
RUNTIME = Path("/tmp/trtforge-serve-1-x")


def ports(**more: object) -> ServeConfig:
    http, grpc, metrics = free_ports(3)
    return ServeConfig(**({"http_port": http, "grpc_port": grpc, "metrics_port": metrics} | more))  # type: ignore[arg-type]


def test_the_first_free_port_above_the_others_is_taken_and_kept() -> None:
    config = ports()
    with with_openai_port(config) as settled, with_openai_port(config) as other:
        assert settled.openai_port is not None
        assert settled.openai_port > max(config.ports.values())
        assert other.openai_port not in (None, settled.openai_port)
        require_free_ports(settled)
        with socket.create_server(("127.0.0.1", settled.openai_port)):  # as the gateway listens
            assert listens(os.getpid(), settled.openai_port)
            assert not listens(os.getppid(), settled.openai_port)
    assert not listens(os.getpid(), settled.openai_port)


def test_a_given_port_is_taken_as_it_is() -> None:
    with with_openai_port(ports(openai_port=9123)) as settled:
        assert settled.openai_port == 9123
    with pytest.raises(ForgeError, match="the HTTP, gRPC, metrics and OpenAI ports must differ"):
        require_free_ports(ServeConfig(openai_port=8000))


def test_too_few_open_files_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    require_open_files()
    monkeypatch.setattr("trtforge.serve.stage.raise_open_file_limit", lambda: 64)
    with pytest.raises(ForgeError, match="the limit of open files is 64, the server needs 128 and more") as caught:
        require_open_files()
    assert "`ulimit -n 4096`" in caught.value.hint


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = ports(openai_port=other.getsockname()[1])
        with pytest.raises(ForgeError, match="port in use") as caught:
            require_free_ports(config)
    assert "--openai-port" in caught.value.hint


def test_without_its_packages_the_api_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "fastapi" else object())
    with with_openai_port(ports()) as settled:
        assert (settled.openai, settled.openai_port) == (False, None)
        assert gateway_command(settled, FACTS, required=False) is None
    with (
        pytest.raises(ForgeError, match="--openai-port needs the package fastapi") as caught,
        with_openai_port(ports(openai_port=9000)),
    ):
        pass
    assert caught.value.hint == f"Run `{install_command('openai')}`."


@pytest.mark.parametrize(
    ("option", "given"),
    [("--openai-port", {"openai_port": 9000}), ("--reasoning-parser", {"reasoning_parser": "qwen3"})],
)
def test_contrary_options_are_refused(option: str, given: dict[str, Any]) -> None:
    said = f"{option} and --no-openai exclude each other"
    with pytest.raises(UsageError, match=said), with_openai_port(ports(openai=False, **given)):
        pass


def test_the_command_has_the_same_keys_and_is_shown(fake_repository: Path, tmp_path: Path) -> None:
    facts = read_facts(open_to_run(fake_repository, "repository"))
    config = ServeConfig(openai_port=8003, api_key_file=tmp_path / "keys")
    launch = plan_launch(config, fake_repository, facts, RUNTIME)
    assert launch.gateway is not None
    argv = (
        *(sys.executable, "-m", GATEWAY, "--wait", "--host=127.0.0.1", "--port=8003", "--backend=127.0.0.1:8001"),
        *("--model=ensemble", "--drain-timeout=2", f"--api-key-file={tmp_path / 'keys'}"),
    )
    assert launch.gateway.argv == argv
    assert " \\\n  ".join(argv) in launch.describe()
    assert plan_launch(ServeConfig(), fake_repository, facts, RUNTIME).gateway is None


def test_the_gateway_knows_the_form_of_reasoning(fake_repository: Path) -> None:
    facts = read_facts(open_to_run(fake_repository, "repository"))
    launch = plan_launch(ServeConfig(openai_port=8003, reasoning_parser="qwen3"), fake_repository, facts, RUNTIME)
    assert launch.gateway is not None
    assert launch.gateway.argv[-1] == "--reasoning-parser=qwen3"


def test_the_gateway_and_the_front_allow_the_same_hosts(fake_repository: Path) -> None:
    facts = read_facts(open_to_run(fake_repository, "repository"))
    config = ServeConfig(openai_port=8003, allowed_hosts=("llm.example", "gpu1"))
    launch = plan_launch(config, fake_repository, facts, RUNTIME)
    assert launch.gateway is not None
    assert launch.front is not None
    for command in (launch.gateway, launch.front):
        assert command.argv[-2:] == ("--allow-host=llm.example", "--allow-host=gpu1")


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("llm.example", 200), ("evil.example", 403)])
def test_a_gateway_on_loopback_looks_at_the_host(host: str, status: int) -> None:
    port = free_ports(1)[0]
    words = ("--backend", "127.0.0.1:1", "--port", str(port), "--allow-host", "llm.example")
    with subprocess.Popen([sys.executable, "-m", "trtforge", "gateway", *words], stdout=subprocess.PIPE) as gateway:
        try:
            assert gateway.stdout is not None
            assert gateway.stdout.readline() == f"openai=http://127.0.0.1:{port}/v1\n".encode()
            url = f"http://127.0.0.1:{port}/metrics"
            answer = eventually_answered(url, host)
            assert answer.status_code == status
        finally:
            gateway.terminate()


def eventually_answered(url: str, host: str) -> httpx.Response:
    """The answer of a server that says where it listens a moment before it does."""
    answers: list[httpx.Response] = []

    def asked() -> bool:
        try:
            answers.append(httpx.get(url, headers={"host": host}, timeout=PATIENCE))
        except httpx.ConnectError:
            return False
        return True

    assert eventually(asked)
    return answers[0]


@pytest.mark.parametrize("keys", [None, Path("keys")])
@pytest.mark.parametrize("port", [None, 8003])
def test_commands_to_try_hold_addresses_and_no_key(keys: Path | None, port: int | None) -> None:
    config = ServeConfig(openai_port=port, api_key_file=keys, host="0.0.0.0", http_port=9000)
    curl, infer, python = first_steps(config, "llama_ensemble")
    url = "http://127.0.0.1:8003/v1" if port else "http://127.0.0.1:9000/v2/models/llama_ensemble/generate"
    assert url in curl
    assert url in python
    assert infer == "trtforge infer Hello --url 127.0.0.1:8001 --model llama_ensemble".replace(
        "127.0.0.1:8001", config.grpc_address
    )
    assert ("TRTFORGE_API_KEY" in curl, "TRTFORGE_API_KEY" in python) == (keys is not None, keys is not None)
    compile(python.removeprefix('python -c "').removesuffix('"'), "python", "exec")


def openai_url(server: Running) -> str:
    """What the line after `ready` says."""
    assert server.process.stdout is not None
    return server.process.stdout.readline().strip().removeprefix("openai=")


def ask(url: str, **options: object) -> openai.types.Completion:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)
    return client.completions.create(  # type: ignore[call-overload, no-any-return]
        **{"model": "ensemble", "prompt": "one two three", "max_tokens": 4, "temperature": 0, **options}
    )


def test_it_answers_and_its_death_ends_a_server_that_was_asked_for_it(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository, openai=True, openai_port=free_ports(1)[0])
    server.wait_ready()
    url = openai_url(server)
    assert ask(url).choices[0].text
    gateway = server.child(GATEWAY)
    assert gateway is not None
    os.kill(gateway, signal.SIGKILL)
    _, said = server.process.communicate(timeout=PATIENCE)
    assert server.process.returncode == 1
    assert "the OpenAI gateway" in said.rpartition("error:")[2]
    assert f"curl {url}/completions" in said
    assert left_behind(server.process.pid) == []


LOST = "the OpenAI gateway (process {}) ended with status {}{}; the server goes on without OpenAI's API"


def test_its_death_is_a_warning_if_nobody_asked_for_it(fake_repository: Path, start: Start) -> None:
    server = start(fake_repository, openai=True, restart="on-failure")
    server.wait_ready()
    url = openai_url(server)
    gateway = server.child(GATEWAY)
    assert gateway is not None
    os.kill(gateway, signal.SIGKILL)
    assert server.process.stderr is not None
    lost = next(line.strip() for line in server.process.stderr if line.startswith("the OpenAI gateway"))
    assert lost == LOST.format(gateway, -signal.SIGKILL, "")
    assert generate(server.grpc, "ensemble", "one two", Sampling(max_tokens=4)).text
    os.kill(server.triton(), signal.SIGKILL)
    server.wait_ready()
    assert openai_url(server) == url  # the next start tries it again
    assert ask(url).choices[0].text
    server.process.send_signal(signal.SIGTERM)
    rest, said = server.process.communicate(timeout=PATIENCE)
    assert (server.process.returncode, rest) == (0, "")
    assert "the OpenAI gateway" not in said
    assert "restarting in 1 s: the Triton server" in said
    assert left_behind(server.process.pid) == []


def test_a_port_that_another_program_took_is_a_warning_if_nobody_asked_for_it(
    fake_repository: Path, start: Start
) -> None:
    ports = free_ports(4)
    named = dict(zip(("http_port", "grpc_port", "metrics_port"), sorted(ports)[:3], strict=True))
    server = start(fake_repository, openai=True, **named)
    assert eventually(lambda: server.child(GATEWAY) is not None)
    gateway = server.child(GATEWAY)
    assert gateway is not None
    words = Path(f"/proc/{gateway}/cmdline").read_text().split("\0")
    port = int(next(word for word in words if word.startswith("--port=")).removeprefix("--port="))
    with socket.create_server(("127.0.0.1", port)):
        assert server.process.stdout is not None
        assert server.process.stdout.readline().startswith("ready ")
        assert server.process.stderr is not None
        warning = next(line.strip() for line in server.process.stderr if line.startswith("the OpenAI gateway"))
        steps = server.process.stderr.readline(), server.process.stderr.readline()
    # not always the first one: a Triton server that failed by chance is started again, with another gateway
    assert re.match(r"the OpenAI gateway \(process \d+\) ended with status 1: error: ", warning)
    assert f"127.0.0.1:{port}" in warning
    assert warning.endswith("; the server goes on without OpenAI's API")
    assert steps[0] == "try:\n"
    assert "/v2/models/ensemble/generate" in steps[1]
    server.process.send_signal(signal.SIGTERM)
    rest, said = server.process.communicate(timeout=PATIENCE)
    assert (server.process.returncode, rest) == (0, "")
    assert "the OpenAI gateway" not in said


def test_a_running_stream_finishes_while_draining(fake_repository: Path, start: Start, slow: Path) -> None:
    server = start(fake_repository, openai=True, drain_timeout=PATIENCE)
    server.wait_ready()
    url = openai_url(server)
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)
    stream = client.completions.create(model="ensemble", prompt="one two", max_tokens=150, stream=True)
    chunks = [next(stream)]
    server.process.send_signal(signal.SIGTERM)
    refused: list[int] = []

    def refuses() -> bool:
        try:
            ask(url)
        except openai.APIStatusError as error:
            refused.append(error.status_code)
        return bool(refused)

    assert eventually(refuses)
    slow.unlink()
    chunks += list(stream)
    assert (refused, chunks[-1].choices[0].finish_reason) == ([503], "length")
    _, said = server.process.communicate(timeout=PATIENCE)
    assert server.process.returncode == 0
    assert said.splitlines()[-1].startswith("stopped: ")
    assert said.splitlines()[-1].endswith(" 0 cut")


def test_keys_hold_for_both_apis(fake_repository: Path, start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key-of-this-test-0123\n")
    file.chmod(0o600)
    server = start(fake_repository, openai=True, api_key_file=str(file))
    server.wait_ready()
    url = openai_url(server)
    assert httpx.get(f"{url}/models", timeout=PATIENCE).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        ask(url)
    headers = {"authorization": "Bearer a-key-of-this-test-0123"}
    assert httpx.get(f"{url}/models", headers=headers, timeout=PATIENCE).json()["data"][0]["id"] == "ensemble"
    server.end()
    assert server.process.stderr is not None
    assert "a-key-of-this-test-0123" not in server.process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_gateway_of_its_own_finds_the_model_and_stops_when_told(server: Running, number: signal.Signals) -> None:
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "trtforge", "gateway", "--backend", server.grpc, "--port", str(port)]
    with subprocess.Popen(
        [*command, "--served-model-name", "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as gateway:
        assert gateway.stdout is not None
        line = gateway.stdout.readline().strip()
        assert line == f"openai=http://127.0.0.1:{port}/v1"
        assert ask(line.removeprefix("openai="), model="demo").model == "demo"
        gateway.send_signal(number)
        assert gateway.communicate(timeout=PATIENCE) == ("", "")
        assert gateway.returncode == 0


def test_a_gateway_without_a_server_answers_503(tmp_path: Path) -> None:
    port, backend = free_ports(2)
    command = [sys.executable, "-m", "trtforge", "gateway", "--backend", f"127.0.0.1:{backend}", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        url = gateway.stdout.readline().strip().removeprefix("openai=")
        with pytest.raises(openai.InternalServerError) as caught:
            ask(url)
        assert (caught.value.status_code, caught.value.code) == (503, "server_unavailable")
        assert httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=PATIENCE).status_code == 503
        gateway.send_signal(signal.SIGINT)
        gateway.communicate(timeout=PATIENCE)
        assert gateway.returncode == 0


def test_a_wrong_address_is_said() -> None:
    command = [sys.executable, "-m", "trtforge", "gateway", "--backend", "http://x:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'http://x:1' is not HOST:PORT" in done.stderr


def test_the_gateway_imports_nothing_heavy() -> None:
    code = "import sys, trtforge.gateway.server; print({'torch', 'transformers', 'openai', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_address_without_ports_is_said_by_the_check_of_all_ports(fake_repository: Path) -> None:
    config = ports(host="192.0.2.1")
    with with_openai_port(config) as settled:
        assert settled.openai_port == max(config.ports.values()) + 1
        with pytest.raises(ForgeError, match=rf"cannot listen on 192\.0\.2\.1:{config.http_port} \(Cannot assign"):
            require_free_ports(settled)


def test_a_dry_run_binds_nothing(
    fake_repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: pytest.fail("a port was bound"))
    assert serve(ServeConfig(dry_run=True, host="192.0.2.1", http_port=9000), fake_repository) == 0
    assert "--port=9001" in capsys.readouterr().out
    with with_openai_port(ServeConfig(dry_run=True, metrics_port=65535, http_port=65534)) as settled:
        assert settled.openai_port == 65533


def test_candidates_end_with_any_free_port(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = ports(metrics_port=65535)
    with with_openai_port(config) as settled:
        assert settled.openai_port not in (None, *config.ports.values())
    monkeypatch.setattr(gateway_process, "_TRIED", 0)
    with with_openai_port(config) as settled:
        assert (settled.openai, settled.openai_port) == (False, None)
    assert "no port is free for OpenAI's API" in caplog.text
