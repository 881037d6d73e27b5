"""Doors of the real server, tried with the real clients: closed as it starts, open where they are named."""

import os
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from tests.patience import PATIENCE
from tests.serve.conftest import Running, Start
from trtforge.core.errors import ForgeError
from trtforge.machine.processes import session_processes
from trtforge.serve.client import Sampling, generate
from trtforge.serve.config import ServeConfig
from trtforge.serve.probe import probe
from trtforge.serve.stage import serve

KEY = "a-key-of-the-tests-0123456789"

CLOSED: dict[str, Callable[[Any], object]] = {
    "register shared memory": lambda client: client.register_system_shared_memory("a", "/a", 16),
    "status of shared memory": lambda client: client.get_system_shared_memory_status(),
    "unregister shared memory": lambda client: client.unregister_system_shared_memory(),
    "register cuda memory": lambda client: client.register_cuda_shared_memory("a", b"x" * 64, 0, 16),
    "status of cuda memory": lambda client: client.get_cuda_shared_memory_status(),
    "load": lambda client: client.load_model("ensemble"),
    "unload": lambda client: client.unload_model("ensemble"),
    "index": lambda client: client.get_model_repository_index(),
    "configuration": lambda client: client.get_model_config("ensemble"),
    "statistics": lambda client: client.get_inference_statistics(),
    "trace": lambda client: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
    "trace settings": lambda client: client.get_trace_settings(),
    "log": lambda client: client.update_log_settings({"log_verbose_level": 9}),
    "log settings": lambda client: client.get_log_settings(),
}


def refused(call: Callable[[Any], object], client: object) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call(client)
    return str(caught.value)


@pytest.mark.parametrize("what", CLOSED)
def test_a_closed_door_refuses_both_clients(server: Running, what: str) -> None:
    with grpc.InferenceServerClient(server.grpc) as client:
        assert "This protocol is restricted" in refused(CLOSED[what], client)
    with http.InferenceServerClient(server.http) as client:
        assert "is closed on this server; trtforge serve --open" in refused(CLOSED[what], client)


def test_what_clients_need_is_open(server: Running) -> None:
    for module, url in ((grpc, server.grpc), (http, server.http)):
        with module.InferenceServerClient(url) as client:
            assert client.is_server_ready()
            assert client.is_model_ready("ensemble")
            assert client.get_server_metadata()
            assert client.get_model_metadata("ensemble")


def test_a_region_of_the_python_backend_is_closed_to_clients_and_users(server: Running) -> None:
    regions = list(Path("/dev/shm").glob(f"trtforge-serve-{server.process.pid}-*"))
    assert regions
    assert {region.stat().st_mode & 0o777 for region in regions} == {0o600}
    with grpc.InferenceServerClient(server.grpc) as client:
        refused(lambda one: one.register_system_shared_memory("a", f"/{regions[0].name}", 16), client)


def test_shared_memory_works_where_it_was_opened(fake_repository: Path, start: Start) -> None:
    running = start(fake_repository, open=["shared-memory", "statistics"])
    running.wait_ready()
    region = shared_memory.SharedMemory(create=True, size=16)
    try:
        with grpc.InferenceServerClient(running.grpc) as client:
            client.register_system_shared_memory("a", f"/{region.name}", 16)
            assert "a" in client.get_system_shared_memory_status().regions
            assert client.get_inference_statistics("ensemble").model_stats
            assert "restricted" in refused(CLOSED["log"], client)
        with http.InferenceServerClient(running.http) as client:
            assert [one["name"] for one in client.get_system_shared_memory_status()] == ["a"]
            client.unregister_system_shared_memory("a")
            assert client.get_inference_statistics("ensemble")["model_stats"]
            assert "logging is closed" in refused(CLOSED["log"], client)
    finally:
        region.close()
        region.unlink()


def test_keys_are_asked_for_and_secrets_stay_out(
    fake_repository: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"HF_TOKEN": "hf_1234567890", "MY_API_KEY": "k-1234567890", "AWS_SESSION_TOKEN": "aws-1234567890"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEPT_BY_THE_FILTER", "yes")
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    running = start(fake_repository, api_key_file=str(file), host="127.0.0.1")
    running.wait_ready()
    url = f"http://{running.http}/v2/models/ensemble/generate"
    body = {"text_input": "a", "max_tokens": 2}
    assert httpx.get(f"http://{running.http}/v2/health/ready", timeout=PATIENCE).status_code == 200
    assert httpx.post(url, json=body, timeout=PATIENCE).status_code == 401
    assert httpx.post(url, json=body, headers={"authorization": f"Bearer {KEY}x"}, timeout=PATIENCE).status_code == 401
    assert httpx.post(url, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE).status_code == 200
    monkeypatch.setenv("TRTFORGE_API_KEY", KEY)
    probe("ready", running.http)
    assert generate(running.grpc, "ensemble", "a", Sampling(max_tokens=2)).output_tokens == 2
    processes = [running.front(), *session_processes(running.triton())]
    assert len(processes) >= 7
    for process in processes:
        environment = Path(f"/proc/{process}/environ").read_bytes()
        assert b"KEPT_BY_THE_FILTER=yes" in environment
        for shown in (environment, Path(f"/proc/{process}/cmdline").read_bytes()):
            assert KEY.encode() not in shown
            assert not any(value.encode() in shown for value in secrets.values())
    runtimes = Path(os.environ.get("TMPDIR", "/tmp")).glob(f"trtforge-serve-{running.process.pid}-*")
    logs = [log.read_text() for runtime in runtimes for log in runtime.glob("*.log")]
    assert logs
    assert not any(KEY in log or "trtforge-door=" in log for log in logs)


def test_a_dry_run_shows_the_front_and_no_secret(
    fake_repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    config = ServeConfig(dry_run=True, host="0.0.0.0", open=("statistics",), api_key_file=file)
    assert serve(config, fake_repository) == 0
    printed = capsys.readouterr().out
    for option in ("trtforge.serve.front", "--open=statistics", f"--api-key-file={file}", "--grpc-address=127.0.0.1"):
        assert option in printed
    assert ":trtforge-door=REPLACE_WITH_A_RANDOM_VALUE" in printed
    assert "statistics,trace" not in printed
    assert KEY not in printed


def test_a_bad_key_file_is_refused_before_anything_starts(fake_repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="the API keys cannot be read"):
        serve(ServeConfig(api_key_file=tmp_path / "none"), fake_repository)


def test_an_open_key_file_and_holes_are_warned_of(
    fake_repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.serve.test_launchers import facts_of
    from trtforge.serve.exposure import check_doors
    from trtforge.serve.launchers import plan_launch

    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    file.chmod(0o644)
    config = ServeConfig(api_key_file=file, host="0.0.0.0", allowed_hosts=("llm.example",))
    check_doors(config, plan_launch(config, fake_repository, facts_of(fake_repository), tmp_path))
    assert f"chmod 600 {file}" in caplog.text
    assert "gRPC listens on 127.0.0.1 without keys" in caplog.text
    assert "--allow-host has no effect: with API keys clients may use every host name" in caplog.text
    assert "Triton 24.10 has known vulnerabilities that clients can reach (grpc-cancel-race, " in caplog.text
    assert "CVE-2025-23319" not in caplog.text
    assert KEY not in caplog.text
