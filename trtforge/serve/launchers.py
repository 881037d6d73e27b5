"""The exact command that serves a repository: Triton here, NVIDIA's container, or one MPI rank for each GPU."""

import ctypes
import math
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.packages import installed_version, same_minor
from trtforge.engine_process.rendezvous import RUNTIME_VARIABLE
from trtforge.formats.releases import Container, containers_of, containers_with, release
from trtforge.formats.triton import RepositoryFacts
from trtforge.formats.triton_holes import has_option
from trtforge.machine.nvml import VISIBLE_DEVICES
from trtforge.serve.config import ResolvedLauncher, ServeConfig
from trtforge.serve.doors import door_arguments, new_secret
from trtforge.serve.environment import server_environment
from trtforge.serve.front_process import FrontCommand, http_arguments, private_http
from trtforge.serve.gateway_process import GatewayCommand, gateway_command
from trtforge.serve.installation import Installation, find_installation

_TRTLLM_BACKEND = Path("/opt/tritonserver/backends/tensorrtllm")
_SPARE_THREADS = 32
_BODY_LIMIT = "http-max-input-size"
_BODY_BYTES = 8 * 1024 * 1024
_HIDDEN = "REPLACE_WITH_A_RANDOM_VALUE"
_KEEPALIVE = ("--grpc-keepalive-time=30000", "--grpc-keepalive-timeout=10000")
"""Milliseconds: a client that vanished without closing is noticed after 40 s; Triton's default is 2 hours."""
_EXIT_MARGIN = 10  # seconds


@dataclass(frozen=True)
class Launch:
    """A command and the variables that it adds to the environment.

    `installation` and `view` must be prepared first; `cleanup`: a command that ends what outlives the process.
    `container`: the image to run; None: this machine's server. `front`: the HTTP server that clients talk to; None:
    they talk to Triton's own. `gateway`: OpenAI's API. `secret`: the header value that opens closed doors.
    """

    launcher: ResolvedLauncher
    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    installation: Installation | None = None
    view: Path | None = None
    cleanup: tuple[str, ...] = ()
    container: Container | None = None
    front: FrontCommand | None = None
    gateway: GatewayCommand | None = None
    secret: str = field(default="", repr=False)

    def process_environment(self) -> dict[str, str]:
        """The server's environment: this process's without secrets, and the launch's variables."""
        return server_environment(self.environment)

    def describe(self) -> str:
        """Commands and environment, one argument per line, without the secret."""
        lines = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        commands = [self.argv, *(beside.argv for beside in (self.front, self.gateway) if beside is not None)]
        text = "\n".join([*lines, *(" \\\n  ".join(command) for command in commands)])
        return text.replace(self.secret, _HIDDEN) if self.secret else text


def plan_launch(
    config: ServeConfig, repository: Path, facts: RepositoryFacts, runtime: Path, *, openai_required: bool = True
) -> Launch:
    """The launch of `repository`, with `runtime` for its files. `openai_required`: it fails without OpenAI's API.

    Raises ForgeError if this launcher cannot serve it. `require_runnable` checks that docker, MPI and GPUs are
    available, so that a dry run works everywhere.
    """
    launch = _planned(config, repository, facts, runtime)
    return replace(launch, gateway=gateway_command(config, facts.model("ensemble"), required=openai_required))


def _planned(config: ServeConfig, repository: Path, facts: RepositoryFacts, runtime: Path) -> Launch:
    launcher = _chosen(config, facts)
    if launcher == "docker":
        return _docker(config, repository, facts, runtime)
    if launcher == "mpi":
        return _mpi(config, facts, runtime)
    if facts.world_size > 1 and facts.backend == "tensorrt_llm":
        raise ForgeError(
            f"the engine has {facts.world_size} ranks, the local launcher starts one process",
            hint="Use --launcher mpi (or docker).",
        )
    installation = find_installation(runtime)
    listening = _behind_front(config, runtime)
    server = _server_arguments(config, facts, runtime / "repository", runtime.name, listening)
    return Launch(
        launcher="local",
        argv=(str(installation.program), *server, *installation.arguments),
        environment=installation.environment | _environment(config) | {RUNTIME_VARIABLE: str(runtime)},
        installation=installation,
        view=runtime / "repository",
        front=listening.front,
        secret=listening.secret,
    )


def require_runnable(launch: Launch, facts: RepositoryFacts) -> None:
    """Raises ForgeError if something that the launch needs is not available on this machine."""
    if launch.launcher == "docker":
        if shutil.which("docker") is None:
            raise ForgeError(
                "docker is not installed here",
                hint="Install docker, or run the command of --dry-run on a machine that has it.",
            )
        return
    if facts.device == "cuda" and _gpu_count() == 0:
        raise ForgeError("the engine needs a GPU, this machine has none", hint="Serve it on a machine with a GPU.")
    if facts.backend == "tensorrt_llm" and not _TRTLLM_BACKEND.is_dir():
        raise ForgeError(
            f"this Triton server has no TensorRT-LLM backend ({_TRTLLM_BACKEND} is missing)",
            hint="Use --launcher docker, or run trtforge inside the container that --dry-run names.",
        )
    if facts.backend == "llmapi" and installed_version("tensorrt_llm") is None:
        raise ForgeError(
            "TensorRT-LLM is not installed for this Python: the LLM API cannot run here",
            hint="Use --launcher docker, or run trtforge inside an image that has Triton and TensorRT-LLM.",
        )
    if launch.launcher == "mpi" and shutil.which("mpirun") is None:
        raise ForgeError("mpirun is not installed here", hint="Use NVIDIA's container, or --launcher docker.")


def _chosen(config: ServeConfig, facts: RepositoryFacts) -> ResolvedLauncher:
    if config.launcher != "auto":
        if facts.backend == "torch" and config.launcher != "local":
            raise ForgeError(
                f"--launcher {config.launcher} cannot serve the embedded engine", hint="Use --launcher local (or auto)."
            )
        if facts.backend == "llmapi" and config.launcher == "mpi":
            raise ForgeError(
                "--launcher mpi cannot serve the LLM API, which starts its own process for each GPU",
                hint="Use --launcher local or docker (or auto).",
            )
        return config.launcher
    if facts.backend == "torch":
        return "local"
    if facts.backend == "llmapi":
        here = installed_version("tensorrt_llm")
        return "local" if here is not None and same_minor(here, facts.tensorrt_llm) else "docker"
    if not _TRTLLM_BACKEND.is_dir():
        return "docker"
    return "mpi" if facts.world_size > 1 else "local"


@dataclass(frozen=True)
class _Listening:
    """Triton's HTTP options and the secret that closes its doors. `front` None: clients reach Triton directly."""

    http: tuple[str, ...]
    secret: str
    front: FrontCommand | None = None


def _behind_front(config: ServeConfig, runtime: Path) -> _Listening:
    upstream = private_http(runtime)
    keys = None if config.api_key_file is None else config.api_key_file.absolute()
    front = FrontCommand(config.host, config.http_port, upstream, config.open, keys)
    return _Listening(http_arguments(upstream, config.http_port), new_secret(), front)


def _server_arguments(
    config: ServeConfig, facts: RepositoryFacts, repository: Path, prefix: str, listening: _Listening
) -> tuple[str, ...]:
    """Options of the Triton server that listens. `prefix`: of its shared memory names."""
    return (
        f"--model-repository={repository}",
        *listening.http,
        f"--grpc-address={config.grpc_host}",
        f"--grpc-port={config.grpc_port}",
        *_KEEPALIVE,
        f"--metrics-address={config.host}",
        f"--metrics-port={config.metrics_port}",
        *door_arguments(config.open, listening.secret, http=listening.front is None),
        *(("--allow-gpu-metrics=false",) if facts.device == "cpu" else ()),
        *_common_arguments(facts, prefix),
        # Later than `trtforge serve` ends a slow server, so that Triton does not exit in the middle of unloading.
        f"--exit-timeout-secs={math.ceil(config.drain_timeout) + _EXIT_MARGIN}",
    )


def _environment(config: ServeConfig) -> dict[str, str]:
    """Variables for the models: text models call an engine model that Triton itself runs at this address."""
    return {"TRTFORGE_GRPC_URL": config.grpc_address}


def _common_arguments(facts: RepositoryFacts, prefix: str) -> tuple[str, ...]:
    """Options of every server of a repository.

    In repositories packaged by trtforge 0.1 a request that waits for its first token holds a thread of the Python
    backend, which has 32 threads by default.
    """
    return (
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={prefix}_",
        f"--backend-config=python,thread-pool-size={facts.concurrency + _SPARE_THREADS}",
    )


def _mpi(config: ServeConfig, facts: RepositoryFacts, runtime: Path) -> Launch:
    listening = _behind_front(config, runtime)
    argv = _mpi_command(config, facts, runtime / "repository", runtime.name, listening)
    return Launch(
        launcher="mpi",
        argv=argv,
        environment=_environment(config),
        view=runtime / "repository",
        front=listening.front,
        secret=listening.secret,
    )


def _mpi_command(
    config: ServeConfig, facts: RepositoryFacts, repository: Path, prefix: str, listening: _Listening
) -> tuple[str, ...]:
    """TensorRT-LLM's leader mode: one server per rank; the first listens, the others only load the engine."""
    command = ["mpirun", "--allow-run-as-root"]
    for rank in range(facts.world_size):
        command += ["-n", "1", "tritonserver"]
        if rank == 0:
            command += _server_arguments(config, facts, repository, f"{prefix}_{rank}", listening)
        else:
            command += [
                f"--model-repository={repository}",
                "--model-control-mode=explicit",
                f"--load-model={facts.model('tensorrt_llm')}",
                "--allow-http=false",
                "--allow-grpc=false",
                "--allow-metrics=false",
                *_common_arguments(facts, f"{prefix}_{rank}"),
            ]
        command.append(":")
    return tuple(command[:-1])


def _docker(config: ServeConfig, repository: Path, facts: RepositoryFacts, runtime: Path) -> Launch:
    containers = _containers(facts)
    if not containers:
        raise ForgeError(
            f"no known container has TensorRT-LLM {facts.tensorrt_llm}",
            hint="Build the engine for a release that a container carries, 1.2.1 for example, or serve it with "
            "--launcher local inside an image that has Triton and that release.",
        )
    if config.api_key_file is not None:
        raise ForgeError(
            "--launcher docker does not support --api-key-file: clients reach Triton's own HTTP, which checks no keys",
            hint="Run `trtforge serve` inside the container, or put a gateway that checks keys in front of it.",
        )
    root = Path(facts.engine_path).parents[2]
    listening = _in_container(config, containers[0].triton)
    server = (
        ("tritonserver", *_server_arguments(config, facts, root, runtime.name, listening))
        if facts.world_size == 1 or facts.backend == "llmapi"
        else _mpi_command(config, facts, root, runtime.name, listening)
    )
    argv = (
        *("docker", "run", "--rm", "--name", runtime.name),
        *(word for name, value in _environment(config).items() for word in ("--env", f"{name}={value}")),
        *("--gpus", "all", "--network", "host"),
        *("--shm-size", "2g", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
        *("--volume", f"{repository.resolve()}:{root}:ro"),
        containers[0].image,
        *server,
    )
    cleanup = ("docker", "rm", "--force", runtime.name)
    return Launch(launcher="docker", argv=argv, cleanup=cleanup, container=containers[0], secret=listening.secret)


def _in_container(config: ServeConfig, triton: str) -> _Listening:
    """Triton's own HTTP, with a limit on body size if the image's release has that option."""
    limit = (f"--{_BODY_LIMIT}={_BODY_BYTES}",) if has_option(triton, _BODY_LIMIT) else ()
    http = (f"--http-address={config.host}", f"--http-port={config.http_port}", *limit)
    return _Listening(http, new_secret())


def _containers(facts: RepositoryFacts) -> tuple[Container, ...]:
    if facts.backend == "llmapi":
        return containers_with(facts.tensorrt_llm)
    return containers_of(release(facts.tensorrt_llm))


def _gpu_count() -> int:
    """Number of GPUs that the driver reports; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return 0 if os.environ.get(VISIBLE_DEVICES) == "" else count.value
