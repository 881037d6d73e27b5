"""The exact commands, and what is said where they cannot run."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conftest import DEMO_MODEL
from tests.package.engines import tensorrt_engine
from trtforge.compile.stage import CompileOptions, compile_engine
from trtforge.core import packages
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import open_artifact
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import EngineConfig
from trtforge.formats.triton import RepositoryFacts, read_facts
from trtforge.launch import containers
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve import launchers
from trtforge.serve.config import ServeConfig
from trtforge.serve.front_process import http_arguments, private_http
from trtforge.serve.launchers import Launch, plan_launch, require_runnable
from trtforge.serve.stage import serve
from trtforge.serve.view import make_view

RUNTIME = Path("/tmp/trtforge-serve-1-x")


@pytest.fixture
def in_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton had the TensorRT-LLM backend and there were two GPUs and MPI."""
    monkeypatch.setattr(launchers, "_TRTLLM_BACKEND", tmp_path)
    monkeypatch.setattr(launchers, "_gpu_count", lambda: 2)
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")


def tensorrt_repository(tmp_path: Path, tp: int = 1, version: str = "1.2.1", **config: object) -> Path:
    engine = tensorrt_engine(tmp_path / "engine", tp, version)
    return package(PackageConfig.parse(config, "test"), engine, DEMO_MODEL, tmp_path / "repository").path


def plan(repository: Path, **config: object) -> Launch:
    return plan_launch(ServeConfig.parse(config, "test"), repository, facts_of(repository), RUNTIME)


def facts_of(repository: Path) -> RepositoryFacts:
    return read_facts(open_artifact(repository, "repository"))


def test_docker_runs_the_container_of_the_engines_release(tmp_path: Path) -> None:
    repository = tensorrt_repository(tmp_path, version="1.1.0")
    launch = plan(repository, launcher="docker", http_port=9000)
    assert launch.launcher == "docker"
    argv = list(launch.argv)
    image = "nvcr.io/nvidia/tritonserver:26.02-trtllm-python-py3"
    assert argv[:5] == ["docker", "run", "--rm", "--name", RUNTIME.name]
    assert argv[5 : argv.index(image)] == [
        *("--env", "TRTFORGE_GRPC_URL=127.0.0.1:8001"),
        *("--gpus", "all", "--network", "host", "--shm-size", "2g"),
        *("--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--volume", f"{repository}:/models:ro"),
    ]
    assert argv[argv.index(image) + 1 : argv.index(image) + 5] == [
        "tritonserver",
        "--model-repository=/models",
        "--http-address=127.0.0.1",
        "--http-port=9000",
    ]
    assert "--disable-auto-complete-config" in argv


def test_what_a_dry_run_prints_is_read_by_a_shell_as_it_is_run(tmp_path: Path) -> None:
    place = tmp_path / "a $b 'c'"
    place.mkdir()
    launch = plan(tensorrt_repository(place), launcher="docker")
    assert shlex.split(launch.describe().replace("\\\n", "")) == [
        word.replace(launch.secret, "REPLACE_WITH_A_RANDOM_VALUE") for word in launch.argv
    ]
    launch = Launch("local", ("run", "--file=a b"), {"TRTFORGE_TRACE": "/x/my trace.json"})
    assert launch.describe() == "TRTFORGE_TRACE='/x/my trace.json'\nrun \\\n  '--file=a b'"


@pytest.mark.parametrize(("launcher", "mark"), [("docker", ":"), ("slurm", ":"), ("slurm", ",")])
def test_paths_that_containers_cannot_mount_are_refused(tmp_path: Path, launcher: str, mark: str) -> None:
    place = tmp_path / f"a{mark}b"
    place.mkdir()
    with pytest.raises(ForgeError, match=f"^{place}/repository: containers cannot mount a path with a ") as caught:
        plan(tensorrt_repository(place), launcher=launcher)
    assert caught.value.hint.startswith("Use a path without a colon")


def test_docker_mounts_where_the_engine_is_looked_for(tmp_path: Path) -> None:
    repository = tensorrt_repository(tmp_path, serving_root="/srv/llm")
    argv = plan(repository, launcher="docker").argv
    assert f"{repository}:/srv/llm:ro" in argv
    assert "--model-repository=/srv/llm" in argv


def test_mpi_starts_a_server_for_every_rank_of_which_one_listens(tmp_path: Path, in_container: None) -> None:
    launch = plan(tensorrt_repository(tmp_path, tp=2))
    assert launch.launcher == "mpi"
    head, first, second = " ".join(launch.argv).partition(" -n 1 ")[0], *" ".join(launch.argv).split(" : ")
    assert head == "mpirun --allow-run-as-root"
    assert "--http-port=8000" in first
    assert "--load-model" not in first
    for option in ("--model-control-mode=explicit", "--load-model=tensorrt_llm", "--allow-http=false"):
        assert option in second
    assert f"shm-region-prefix-name={RUNTIME.name}_0_" in first
    assert f"shm-region-prefix-name={RUNTIME.name}_1_" in second
    require_runnable(launch, facts_of(tmp_path / "repository"))


def test_auto_takes_docker_outside_the_container(tmp_path: Path) -> None:
    assert plan(tensorrt_repository(tmp_path)).launcher == "docker"


def test_local_takes_one_rank_only(tmp_path: Path, in_container: None) -> None:
    with pytest.raises(ForgeError, match="the engine has 2 ranks, the local launcher starts one process"):
        plan(tensorrt_repository(tmp_path, tp=2), launcher="local")


def test_embedded_engine_is_not_put_into_a_container(fake_repository: Path) -> None:
    with pytest.raises(ForgeError, match="--launcher docker cannot serve the embedded engine"):
        plan(fake_repository, launcher="docker")


def test_the_commands_of_a_dry_run_put_the_wheels_python_backend_together(
    fake_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    by_hand, by_serve = (
        plan_launch(ServeConfig(), fake_repository, facts_of(fake_repository), tmp_path / name) for name in "ab"
    )
    printed = by_hand.describe()
    subprocess.run(["bash", "-ec", printed[: printed.index("\nLD_LIBRARY_PATH=")]], check=True)
    assert by_serve.installation is not None
    by_serve.installation.prepare()
    linked, expected = ({path.name: path.readlink() for path in (tmp_path / name).rglob("*.*")} for name in "ab")
    assert linked == expected
    assert {"libtriton_python.so", "triton_python_backend_utils.py"} <= set(linked)
    assert f"--backend-directory={tmp_path / 'a' / 'backends'}" in by_hand.argv
    stubs = [tmp_path / name / "backends" / "python" / "triton_python_backend_stub" for name in "ab"]
    assert stubs[0].readlink() == stubs[1].readlink()


def test_missing_docker_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ForgeError, match="docker is not installed here") as caught:
        serve(ServeConfig(launcher="docker"), tensorrt_repository(tmp_path))
    assert "--dry-run" in caught.value.hint


def test_missing_gpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_gpu_count", lambda: 0)
    repository = tensorrt_repository(tmp_path)
    launch = plan(repository, launcher="local")
    with pytest.raises(ForgeError, match="the engine needs a GPU, this machine has none"):
        require_runnable(launch, facts_of(repository))


def test_missing_backend_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_gpu_count", lambda: 1)
    repository = tensorrt_repository(tmp_path)
    launch = plan(repository, launcher="local")
    with pytest.raises(ForgeError, match="no TensorRT-LLM backend"):
        require_runnable(launch, facts_of(repository))


def test_view_points_the_engine_to_where_it_is_now(tmp_path: Path) -> None:
    repository = tensorrt_repository(tmp_path)
    make_view(repository, tmp_path / "view", facts_of(repository))
    config = (tmp_path / "view" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert f'"{repository}/tensorrt_llm/1/engine"' in config
    assert "/models/" not in config
    assert (tmp_path / "view" / "ensemble" / "1" / "model.py").read_bytes() == (
        repository / "ensemble" / "1" / "model.py"
    ).read_bytes()
    assert not (tmp_path / "view" / "ensemble" / "1").is_symlink()


def test_engine_of_a_release_without_container_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "containers_of", lambda wanted: ())
    with pytest.raises(ForgeError, match=r"no known container has TensorRT-LLM 1\.2\.1"):
        plan(tensorrt_repository(tmp_path), launcher="docker")


def llmapi_repository(tmp_path: Path, version: str, tp: int = 1) -> Path:
    config = EngineConfig.parse({"backend": "llmapi", "target": {"tensorrt_llm": version}}, "test")
    options = CompileOptions(parallel=Parallel(tp=tp))
    engine = compile_engine(config, DEMO_MODEL, tmp_path / "engine", options).path
    return package(PackageConfig(), engine, None, tmp_path / "repository").path


def test_a_release_without_triton_is_served_by_trtllm_serve_with_the_same_arguments(tmp_path: Path) -> None:
    repository = llmapi_repository(tmp_path, "1.3.0", tp=2)
    with pytest.raises(ForgeError, match=r"no known container has TensorRT-LLM 1\.3\.0") as refused:
        plan(repository, launcher="docker")
    assert "--launcher trtllm-serve --dry-run" in refused.value.hint
    launch = plan(repository, launcher="trtllm-serve", http_port=8123, reasoning_parser="qwen3")
    words = list(launch.argv)
    assert words[:3] == ["docker", "run", "--rm"]
    written = yaml.safe_load((repository / "tensorrt_llm" / "1" / "trtllm_serve.yaml").read_text())
    image = words.index("nvcr.io/nvidia/tensorrt-llm/release:1.3.0")
    assert words[image + 1 :] == [
        *("trtllm-serve", "/models/tensorrt_llm/1/engine", "--host", "127.0.0.1", "--port", "8123"),
        *(f"--max_batch_size {written['max_batch_size']} --max_num_tokens {written['max_num_tokens']}".split()),
        *(f"--max_seq_len {written['max_seq_len']} --max_beam_width {written['max_beam_width']}".split()),
        *("--extra_llm_api_options", "/models/tensorrt_llm/1/trtllm_serve.yaml"),
        *("--reasoning_parser", "qwen3"),
    ]
    assert f"{repository}:/models:ro" in words
    arguments = yaml.safe_load((repository / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert written == {key: value for key, value in arguments.items() if key not in ("model", "backend")}
    assert written["tensor_parallel_size"] == 2
    with pytest.raises(ForgeError, match="--launcher trtllm-serve prints a command and starts nothing itself"):
        require_runnable(launch, facts_of(repository))


def test_trtllm_serve_over_nodes_is_a_batch_script(tmp_path: Path) -> None:
    script = plan(llmapi_repository(tmp_path, "1.3.0", tp=4), launcher="trtllm-serve", nodes=2).describe()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks=4\n#SBATCH --ntasks-per-node=2\n" in script
    assert "'--container-image=nvcr.io#nvidia/tensorrt-llm/release:1.3.0' \\\n" in script
    assert "  trtllm-llmapi-launch trtllm-serve /models/tensorrt_llm/1/engine --host" in script


def test_trtllm_serve_runs_the_llm_api_alone_and_checks_no_keys(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="cannot serve backend tensorrt_llm: trtllm-serve runs only the LLM API"):
        plan(tensorrt_repository(tmp_path), launcher="trtllm-serve")
    (tmp_path / "keys").write_text("a\n")
    with pytest.raises(ForgeError, match="trtllm-serve does not support --api-key-file"):
        plan(llmapi_repository(tmp_path / "b", "1.3.0"), launcher="trtllm-serve", api_key_file=str(tmp_path / "keys"))


def test_llmapi_runs_one_server_that_starts_its_own_ranks(tmp_path: Path) -> None:
    launch = plan(llmapi_repository(tmp_path, "1.2.1", tp=2))
    assert launch.launcher == "docker"
    assert "mpirun" not in launch.argv
    assert "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in launch.argv
    assert f"{tmp_path / 'repository'}:/models:ro" in launch.argv


@pytest.mark.parametrize(
    ("installed", "launcher"), [("1.2.1", "local"), ("1.2.0rc3", "local"), ("1.3.0", "docker"), ("1.0.0", "docker")]
)
def test_llmapi_is_local_where_its_release_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, launcher: str
) -> None:
    monkeypatch.setattr(packages, "version", lambda package: installed)
    assert plan(llmapi_repository(tmp_path, "1.2.1")).launcher == launcher


def test_llmapi_is_not_served_by_another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda package: "1.2.1")
    with pytest.raises(ForgeError) as caught:
        serve(ServeConfig(launcher="local", dry_run=True), llmapi_repository(tmp_path / "new", "1.3.0"))
    assert caught.value.message == "the engine is for TensorRT-LLM 1.3.0, this machine has TensorRT-LLM 1.2.1"
    assert "--target-version 1.2.1`, or serve it where that release is installed." in caught.value.hint
    monkeypatch.setattr(packages, "version", lambda package: "1.3.0")
    old = llmapi_repository(tmp_path / "old", "1.2.1")
    with pytest.raises(
        ForgeError, match=r"is for TensorRT-LLM 1\.2\.1, this machine has TensorRT-LLM 1\.3\.0"
    ) as caught:
        serve(ServeConfig(launcher="local", dry_run=True), old)
    assert "use --launcher docker (nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3)" in caught.value.hint
    assert serve(ServeConfig(launcher="docker", dry_run=True), old) == 0


def test_llmapi_says_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = llmapi_repository(tmp_path, "1.3.0")
    with pytest.raises(ForgeError, match=r"no known container has TensorRT-LLM 1\.3\.0") as caught:
        plan(repository)
    assert "--launcher local" in caught.value.hint
    with pytest.raises(ForgeError, match="mpi cannot serve the LLM API, which starts its own process for each GPU"):
        plan(repository, launcher="mpi")
    monkeypatch.setattr(launchers, "_gpu_count", lambda: 1)
    with pytest.raises(ForgeError, match="TensorRT-LLM is not installed for this Python"):
        require_runnable(plan(repository, launcher="local"), facts_of(repository))


def test_docker_sets_the_images_own_limits_and_closes_doors(tmp_path: Path) -> None:
    old = plan(tensorrt_repository(tmp_path / "old", version="0.17.0.post1"), launcher="docker")
    new = plan(tensorrt_repository(tmp_path / "new"), launcher="docker", open=["statistics"])
    assert "--http-max-input-size=8388608" in new.argv
    assert not any(argument.startswith("--http-max-input-size") for argument in old.argv)
    for option in ("--grpc-restricted-protocol=", "--http-restricted-api="):
        closed = next(argument for argument in new.argv if argument.startswith(option)).partition(":")[0]
        assert closed == f"{option}shared-memory,model-repository,model-config,trace,logging"
    assert new.front is None
    assert new.secret not in new.describe() + repr(new.front)


def test_each_start_has_its_own_secret(tmp_path: Path, in_container: None) -> None:
    repository = tensorrt_repository(tmp_path, tp=2)
    assert plan(repository).secret != plan(repository).secret


def test_mpi_stands_behind_the_front(tmp_path: Path, in_container: None) -> None:
    launch = plan(tensorrt_repository(tmp_path, tp=2), http_port=9000)
    assert launch.front is not None
    assert launch.front.upstream == f"unix:{RUNTIME}/http.sock"
    assert "--port=9000" in launch.front.argv
    assert f"--http-address=unix:{RUNTIME}/http.sock" in launch.argv


def test_a_long_runtime_path_leaves_a_loopback_port(tmp_path: Path) -> None:
    upstream = private_http(Path("/tmp") / ("x" * 120))
    assert upstream.startswith("127.0.0.1:")
    assert http_arguments(upstream, 8000) == ("--http-address=127.0.0.1", f"--http-port={upstream.split(':')[1]}")


def test_keys_are_not_promised_where_they_are_not_checked(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="--launcher docker does not support --api-key-file"):
        plan(tensorrt_repository(tmp_path), launcher="docker", api_key_file=tmp_path / "keys")
