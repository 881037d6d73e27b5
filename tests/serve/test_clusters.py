"""Engines over several hosts, instances and nodes: mpirun's command, orchestrator mode, and Slurm's batch script."""

import json
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import tensorrt_engine, torch_engine
from tests.serve.test_launchers import RUNTIME, facts_of, llmapi_repository, plan
from trtforge.core.errors import ForgeError
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve import launchers
from trtforge.serve.config import ServeConfig
from trtforge.serve.launchers import require_runnable

STANDIN = """#!/usr/bin/env python3
import json, os, signal, sys
rank = os.environ.get("SLURM_PROCID", os.environ.get("OMPI_COMM_WORLD_RANK", "-"))
names = ("TRTLLM_ORCHESTRATOR", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", "TRTFORGE_GRPC_URL", "PYTHONDONTWRITEBYTECODE")
said = {"rank": rank, "argv": sys.argv[1:], "environment": {name: os.environ.get(name) for name in names}}
with open(os.path.join(os.environ["SAID"], f"{os.getpid()}.json"), "w") as file:
    json.dump(said, file)
if os.environ.get("DIES") == rank:
    sys.exit(f"rank {rank}: out of memory")
if "DIES" in os.environ:
    signal.pause()
"""
AGENT = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
echo "$1" >> "$SAID/agents"; shift
exec bash -c "$*"
"""
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do echo "$1" >> "$SAID/options"; shift; done
for rank in $(seq 0 $((TASKS - 1))); do SLURM_PROCID=$rank "$@" || exit 1; done
"""


@pytest.fixture
def in_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton had the TensorRT-LLM backend, and there were GPUs and MPI."""
    monkeypatch.setattr(launchers, "_TRTLLM_BACKEND", tmp_path)
    monkeypatch.setattr(launchers, "_gpu_count", lambda: 8)
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")


def repository(tmp_path: Path, tp: int = 4, **serving: Any) -> Path:
    engine = tensorrt_engine(tmp_path / "engine", tp)
    config = PackageConfig.parse({"serving": serving, "serving_root": "/srv/llm"}, "test")
    return package(config, engine, DEMO_MODEL, tmp_path / "repository").path


def servers(argv: tuple[str, ...]) -> list[list[str]]:
    """The options of each server that mpirun starts."""
    words = list(argv)
    starts = [index for index, word in enumerate(words) if word == "tritonserver"]
    ends = [*(index for index, word in enumerate(words) if word == ":"), len(words)]
    return [words[start + 1 : end] for start, end in zip(starts, ends, strict=True)]


def test_hosts_share_the_ranks_and_the_packaged_path(tmp_path: Path, in_container: None) -> None:
    launch = plan(repository(tmp_path), launcher="mpi", hosts=["here", "there"])
    head = " ".join(launch.argv[: launch.argv.index("-n")])
    assert head == (
        "mpirun --allow-run-as-root --host here:2,there:2 --map-by slot -x PYTHONDONTWRITEBYTECODE -x TRTFORGE_GRPC_URL"
    )
    assert launch.hostfile == ("here slots=2", "there slots=2")
    assert launch.view is None
    assert launch.environment == {"TRTFORGE_GRPC_URL": "127.0.0.1:8001", "PYTHONDONTWRITEBYTECODE": "1"}
    exported = "-x PYTHONDONTWRITEBYTECODE -x TRTFORGE_GRPC_URL -n 1"
    contexts = " ".join(launch.argv).split(" : ")
    assert [context.count(exported) for context in contexts] == [1, 1, 1, 1], "of a context alone"
    found = servers(launch.argv)
    assert len(found) == 4
    assert all(options[0] == "--model-repository=/srv/llm" for options in found)
    assert ["--allow-grpc=false" in options for options in found] == [False, True, True, True]
    assert launch.describe().splitlines()[:2] == ["# hostfile: here slots=2", "# hostfile: there slots=2"]


def test_instances_are_led_by_one_server_that_starts_their_ranks(tmp_path: Path, in_container: None) -> None:
    launch = plan(repository(tmp_path, 2, gpu_device_ids="0,1;2,3"))
    assert launch.launcher == "orchestrator"
    assert launch.environment == {"TRTFORGE_GRPC_URL": "127.0.0.1:8001", "TRTLLM_ORCHESTRATOR": "1"}
    (server,) = servers(launch.argv)
    assert server[-6:] == [
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        *(f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(4)),
    ]
    require_runnable(launch, facts_of(tmp_path / "repository"))


def test_ranks_that_are_named_are_started_beforehand(tmp_path: Path, in_container: None) -> None:
    launch = plan(repository(tmp_path, 2, gpu_device_ids="0,1;2,3", participant_ids="1,2;3,4"))
    assert launch.environment["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] == "0"
    found = servers(launch.argv)
    assert len(found) == 5
    assert ["--load-model=tensorrt_llm" in options for options in found] == [False, True, True, True, True]


def test_orchestrator_mode_of_one_instance_is_asked_for(tmp_path: Path, in_container: None) -> None:
    launch = plan(repository(tmp_path, 2), launcher="orchestrator")
    assert launch.environment["TRTLLM_ORCHESTRATOR"] == "1"
    assert len(servers(launch.argv)) == 1


def test_a_container_gets_the_mode_too(tmp_path: Path) -> None:
    argv = plan(repository(tmp_path, 1, gpu_device_ids="0;1"), launcher="docker").argv
    assert "TRTLLM_ORCHESTRATOR=1" in argv
    assert argv[argv.index("mpirun") : argv.index("mpirun") + 5] == (
        *("mpirun", "--allow-run-as-root", "-n", "1", "tritonserver"),
    )


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_real_mpirun_starts_the_ranks_in_order_and_ends_all_when_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_TRTLLM_BACKEND", tmp_path)
    launch = plan(repository(tmp_path), launcher="mpi", hosts=[socket.gethostname(), "another-host"])
    programs, said = tmp_path / "bin", tmp_path / "said"
    programs.mkdir()
    said.mkdir()
    for name, text in (("tritonserver", STANDIN), ("agent", AGENT)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    mpi = {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    mpi |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_plm_rsh_agent": str(programs / "agent")}
    environment = {**os.environ, **launch.environment, **mpi, "SAID": str(said), "DIES": "2"}
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    ended = subprocess.run(launch.argv, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "rank 2: out of memory" in ended.stderr
    assert (said / "agents").read_text().split() == ["another-host"]
    records = sorted((json.loads(path.read_text()) for path in said.glob("*.json")), key=lambda record: record["rank"])
    assert [record["rank"] for record in records] == ["0", "1", "2", "3"]
    assert ["--allow-http=false" in record["argv"] for record in records] == [False, True, True, True]
    assert {record["environment"]["TRTFORGE_GRPC_URL"] for record in records} == {"127.0.0.1:8001"}
    assert {record["environment"]["PYTHONDONTWRITEBYTECODE"] for record in records} == {"1"}


def submitted(tmp_path: Path, script: str, tasks: int) -> tuple[list[dict[str, Any]], list[str]]:
    """What the script starts, with stand-ins for srun and the server, in the order of ranks; and srun's options."""
    programs, said = tmp_path / "bin", tmp_path / "said"
    programs.mkdir()
    said.mkdir()
    for name, text in (("tritonserver", STANDIN), ("trtllm-llmapi-launch", '#!/bin/bash\nexec "$@"\n'), ("srun", SRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "serve.sbatch").write_text(script)
    environment = {**os.environ, "SAID": str(said), "TASKS": str(tasks), "PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(tmp_path / "serve.sbatch")], env=environment, check=True)
    records = [json.loads(path.read_text()) for path in said.glob("*.json")]
    return sorted(records, key=lambda record: record["rank"]), (said / "options").read_text().split()


def test_the_batch_script_starts_a_server_a_rank(tmp_path: Path) -> None:
    packaged = repository(tmp_path)
    launch = plan(packaged, launcher="slurm", nodes=2)
    lines = launch.describe().splitlines()
    assert lines[:6] == [
        "#!/bin/bash",
        "#SBATCH --job-name=trtforge",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks=4",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --gpus-per-node=2",
    ]
    assert launch.secret not in launch.script
    started, options = submitted(tmp_path, launch.script, 4)
    assert options == [
        "--mpi=pmix",
        "--kill-on-bad-exit=1",
        "--container-image=nvcr.io#nvidia/tritonserver:26.07-trtllm-python-py3",
        f"--container-mounts={packaged}:/srv/llm:ro",
    ]
    assert [record["rank"] for record in started] == ["0", "1", "2", "3"]
    assert all(record["argv"][0] == "--model-repository=/srv/llm" for record in started)
    assert ["--allow-http=false" in record["argv"] for record in started] == [False, True, True, True]
    for rank, record in enumerate(started):
        assert f"--backend-config=python,shm-region-prefix-name={RUNTIME.name}_{rank}_" in record["argv"]
        assert record["environment"]["PYTHONDONTWRITEBYTECODE"] == "1"
    door = next(word for word in started[0]["argv"] if word.startswith("--grpc-restricted-protocol="))
    assert len(door.rpartition("=")[2]) == 32
    assert "TRTFORGE_DOOR" not in door


def test_the_llm_api_is_started_by_its_own_launcher(tmp_path: Path) -> None:
    launch = plan(llmapi_repository(tmp_path, "1.2.1", tp=2), launcher="slurm")
    assert "  trtllm-llmapi-launch tritonserver" in launch.script
    started, options = submitted(tmp_path, launch.script, 2)
    assert options[:2] == ["--mpi=pmix", "--kill-on-bad-exit=1"]
    assert [record["argv"] for record in started] == [started[0]["argv"]] * 2
    assert "--model-repository=/models" in started[0]["argv"]


def test_a_release_without_a_known_image_has_a_batch_script_too(tmp_path: Path) -> None:
    script = plan(llmapi_repository(tmp_path, "1.3.0", tp=2), launcher="slurm").script
    assert "--container-image" not in script
    assert "http-max-input-size" not in script
    assert "trtllm-llmapi-launch tritonserver" in script


def test_a_script_is_printed_and_not_started(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="slurm does not support --reasoning-parser: its script starts no gateway"):
        plan(repository(tmp_path), launcher="slurm", reasoning_parser="qwen3")
    launch = plan(repository(tmp_path), launcher="slurm")
    with pytest.raises(ForgeError, match="--launcher slurm prints a batch script and starts nothing itself") as caught:
        require_runnable(launch, facts_of(tmp_path / "repository"))
    assert "sbatch FILE" in caught.value.hint
    assert shlex.split(launch.argv[0]) == ["sbatch"]


@pytest.mark.parametrize(
    ("serving", "config", "message"),
    [
        ({}, {"hosts": ["a", "b"]}, "--hosts applies only to --launcher mpi"),
        ({}, {"nodes": 2, "launcher": "mpi"}, "--nodes applies only to --launcher slurm"),
        ({}, {"nodes": 3, "launcher": "slurm"}, "4 ranks cannot be divided over 3 nodes"),
        ({}, {"hosts": ["a", "b", "c"], "launcher": "mpi"}, "4 ranks cannot be divided over 3 nodes"),
        ({}, {"launcher": "slurm", "api_key_file": "keys"}, "--launcher slurm does not support --api-key-file"),
        (
            {"gpu_device_ids": "0,1,2,3;4,5,6,7"},
            {"launcher": "slurm"},
            "this repository needs one server for several instances",
        ),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(
    serving: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ForgeError, match=message):
        plan(repository(tmp_path, **serving), **config)


@pytest.mark.parametrize("launcher", ["slurm", "orchestrator"])
def test_the_embedded_engine_needs_none_of_them(launcher: str, tmp_path: Path) -> None:
    packaged = package(PackageConfig(), torch_engine(tmp_path / "engine"), DEMO_MODEL, tmp_path / "repository").path
    with pytest.raises(ForgeError, match=f"--launcher {launcher} cannot serve the embedded engine"):
        plan(packaged, launcher=launcher)


@pytest.mark.parametrize("hosts", [["a b"], ["-x"], ["a", "a"], ["$(id)"]])
def test_hosts_are_names(hosts: list[str]) -> None:
    with pytest.raises(ForgeError, match="hosts"):
        ServeConfig.parse({"hosts": hosts}, "test")
