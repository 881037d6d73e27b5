"""compose.yaml: what Compose accepts, and what a server needs."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import tensorrt_repository
from tests.deploy.objects import compose_faults, server_command
from tests.serve.test_launchers import RUNTIME, plan
from trtforge import __version__
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.manifest import open_artifact
from trtforge.deploy.compose import compose_files, plan_compose, unreadable, unready_keys
from trtforge.deploy.config import ComposeConfig


def files(repository: Path, out: Path, **config: object) -> dict[str, str]:
    parsed = ComposeConfig.parse({"name": "llama", **config}, "test")
    workload = plan_compose(open_artifact(repository, "repository"), parsed)
    return compose_files(workload, parsed, repository, out)


def service(found: dict[str, str]) -> dict[str, Any]:
    """The one service, after the schema was asked."""
    value = yaml.safe_load(found["compose.yaml"])
    assert compose_faults(value) == []
    (only,) = value["services"].values()
    assert isinstance(only, dict)
    return only


def test_the_server_has_the_command_of_serve_and_no_rights(one_rank: Path, tmp_path: Path) -> None:
    found = service(files(one_rank, tmp_path / "out"))
    launch = plan(one_rank, launcher="docker", host="0.0.0.0")
    server = " ".join(launch.argv[launch.argv.index("tritonserver") :])
    server = server.replace(launch.secret, "${TRTFORGE_DOOR}").replace(f"{RUNTIME.name}_", "trtforge_")
    assert server_command(found["command"][2]) == server.split()
    assert (found["read_only"], found["cap_drop"], found["user"]) == (True, ["ALL"], "1000:1000")
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert {port["host_ip"] for port in found["ports"]} == {"127.0.0.1"}
    assert found["ulimits"]["memlock"] == -1
    assert found["shm_size"] == "2gb"
    assert found["tmpfs"] == ["/tmp:mode=1777,exec"]
    assert found["environment"]["TRTFORGE_GRPC_URL"] == "127.0.0.1:8001"


def test_the_schema_refuses_what_is_wrong(one_rank: Path, tmp_path: Path) -> None:
    value = yaml.safe_load(files(one_rank, tmp_path)["compose.yaml"])
    value["services"]["server"]["helthcheck"] = {}
    value["services"]["server"]["ports"][0]["target"] = {}
    assert len(compose_faults(value)) == 2


def test_gpus_are_the_engines_ranks_and_mpirun_waits_for_requests(four_ranks: Path, tmp_path: Path) -> None:
    found = service(files(four_ranks, tmp_path, drain_timeout=60))
    (device,) = found["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 4, "capabilities": ["gpu"]}
    assert server_command(found["command"][2])[0] == "mpirun"
    assert "nv_trt_llm_request_metrics" in found["pre_stop"][0]["command"][2]
    assert int(found["stop_grace_period"].removesuffix("s")) > 60
    assert "--exit-timeout-secs=70" in found["command"][2]


def test_the_repository_is_mounted_from_where_it_is(one_rank: Path, tmp_path: Path) -> None:
    out = one_rank.parent / "out"
    (mount,) = service(files(one_rank, out))["volumes"]
    assert mount["source"] == "${TRTFORGE_REPOSITORY:-../repository}"
    assert (mount["target"], mount["read_only"]) == ("/models", True)
    assert files(one_rank, out) == files(one_rank, out)
    elsewhere = tensorrt_repository(tmp_path / "other", 1, serving_root="/srv/$llm")
    (mount,) = service(files(elsewhere, out))["volumes"]
    assert mount["target"] == "/srv/$$llm"  # Compose would replace $llm


def test_a_path_is_what_compose_makes_of_it(one_rank: Path, tmp_path: Path) -> None:
    """Its defaults end at the first brace, and it goes up by names alone, also from behind a symbolic link."""
    odd = tensorrt_repository(tmp_path / "a } b", 1)
    (mount,) = service(files(odd, tmp_path / "out"))["volumes"]
    assert mount["source"] == "../a } b/repository"
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    (mount,) = service(files(one_rank, tmp_path / "link" / "out"))["volumes"]
    assert mount["source"] == f"${{TRTFORGE_REPOSITORY:-{one_rank}}}"


def test_what_the_user_of_the_container_may_not_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, keys = tensorrt_repository(tmp_path, 1), tmp_path / "keys"
    manifest = open_artifact(repository, "repository")

    def said() -> list[str]:
        return [*unreadable(manifest, repository), *unready_keys(keys)]

    (missing,) = said()
    assert missing.startswith(f"{keys} does not exist yet")
    keys.write_text("short\n")
    with pytest.raises(ForgeError, match="line 1: a key has at least 16 printable"):
        said()
    with monkeypatch.context() as patched:  # keys that were given to the user of the container, as the warning says
        patched.setattr(os, "access", lambda *_: False)
        assert said() == []
    keys.write_text("0123456789abcdef\n")
    assert said() == []
    monkeypatch.setattr("trtforge.deploy.compose.USER", os.getuid())
    (repository / "ensemble").chmod(0o700)
    assert said() == []
    (in_image,) = unreadable(manifest, repository, in_image=True)  # root owns the files there
    assert f"may not read {repository / 'ensemble'}: " in in_image
    monkeypatch.setattr("trtforge.deploy.compose.USER", os.getuid() + 1000)  # another one than that of the test
    keys.chmod(0o600)
    directory, file = said()
    user = os.getuid() + 1000
    assert directory == (
        f"user {user}, as which the server runs, may not read {repository / 'ensemble'}: "
        f"allow it with `chmod -R a+rX {repository}`"
    )
    assert file.endswith(f"may not read {keys}: allow it with `chown {user} {keys}`")


def test_the_embedded_engine_gets_an_image_of_its_own(embedded: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    found = files(embedded, tmp_path, openai_port=9003, api_key_file=keys, host="0.0.0.0", http_port=9000)
    server = service(found)
    assert server["command"][:3] == ["trtforge", "serve", "/models"]
    assert server["build"]["additional_contexts"] == {"wheel": "${TRTFORGE_WHEEL:-.}"}
    assert f"trtforge-{__version__}-py3-none-any.whl[serve,openai,guided]" in found["Dockerfile"]
    assert {port["name"]: port["published"] for port in server["ports"]} == {
        "http": "9000",
        "metrics": "8002",
        "openai": "9003",
    }
    assert {port["host_ip"] for port in server["ports"]} == {"0.0.0.0"}
    assert server["secrets"] == ["api-keys"]
    assert yaml.safe_load(found["compose.yaml"])["secrets"] == {"api-keys": {"file": "./keys"}}
    assert "--api-key-file" in server["command"]
    assert "deploy" not in server
    assert "TRTFORGE_API_KEY=$$(grep" in server["healthcheck"]["test"][3]


def test_the_reasoning_parser_is_the_servers(embedded: Path, tmp_path: Path) -> None:
    command = service(files(embedded, tmp_path, openai_port=9003, reasoning_parser="qwen3"))["command"]
    assert command[-2:] == ["--reasoning-parser", "qwen3"]
    assert "--reasoning-parser" not in service(files(embedded, tmp_path, openai_port=9003))["command"]
    with pytest.raises(UsageError, match="--reasoning-parser is an option of OpenAI's API, which is served with"):
        files(embedded, tmp_path, reasoning_parser="qwen3")


def test_a_port_of_the_host_is_given_once(embedded: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="--http-port and --metrics-port are the same port of the host: 8002"
    ) as caught:
        files(embedded, tmp_path, http_port=8002)
    assert caught.value.hint == "Choose different ports."
    with pytest.raises(UsageError, match="--metrics-port and --openai-port are the same port of the host: 8002"):
        files(embedded, tmp_path, openai_port=8002)
    ports = service(files(embedded, tmp_path, http_port=8001, api_key_file=tmp_path / "keys"))["ports"]
    assert [port["published"] for port in ports] == ["8001", "8002"], "with keys, gRPC has none"


def test_what_one_host_cannot_serve_is_said(one_rank: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="OpenAI's API is a part of trtforge") as caught:
        files(one_rank, tmp_path, openai_port=8003)
    assert "Leave --openai-port out, and run `trtforge gateway --backend HOST:PORT` with" in caught.value.hint
    with pytest.raises(ForgeError, match="OpenAI's API is a part of trtforge") as caught:
        files(one_rank, tmp_path, openai_port=8003, reasoning_parser="qwen3")
    assert caught.value.hint.startswith("Leave --openai-port and --reasoning-parser out, and run `trtforge gateway")
    with pytest.raises(ForgeError, match="NVIDIA's image runs Triton's own, which checks none"):
        files(one_rank, tmp_path, api_key_file=tmp_path / "keys")
    large = tensorrt_repository(tmp_path, 32)
    with pytest.raises(ForgeError, match="the engine needs 32 GPUs, more than one machine has") as caught:
        files(large, tmp_path)
    assert "trtforge deploy kubernetes REPO OUT --nodes N" in caught.value.hint
