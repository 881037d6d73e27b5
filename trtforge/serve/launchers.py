"""The launch of a repository: Triton on this machine, NVIDIA's container, one MPI rank per GPU, or a Slurm batch
script."""

import ctypes
import os
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.packages import installed_version, same_minor
from trtforge.engine_process.rendezvous import RUNTIME_VARIABLE
from trtforge.formats.releases import Container
from trtforge.formats.triton import RepositoryFacts
from trtforge.launch.containers import (
    SHARED_MEMORY_GIB,
    STACK_BYTES,
    containers_for,
    is_one_server,
    mountable,
    no_container,
)
from trtforge.launch.rank_commands import hostfile, mpi_command, packaged_root, rank_environment
from trtforge.launch.server_arguments import model_environment, server_arguments, without_front
from trtforge.machine.nvml import VISIBLE_DEVICES
from trtforge.serve.cluster import require_cluster
from trtforge.serve.config import ResolvedLauncher, ServeConfig
from trtforge.serve.environment import server_environment
from trtforge.serve.front_process import FrontCommand, behind_front
from trtforge.serve.gateway_process import GatewayCommand, gateway_command
from trtforge.serve.installation import Installation, find_installation
from trtforge.serve.slurm import slurm_script
from trtforge.serve.trtllm_serve import batch_script, docker_command, require_llm_api_repository

_TRTLLM_BACKEND = Path("/opt/tritonserver/backends/tensorrtllm")
_HIDDEN = "REPLACE_WITH_A_RANDOM_VALUE"


@dataclass(frozen=True)
class Launch:
    """A command and the variables that it adds to the environment.

    `installation` and `view` must be prepared first; `cleanup`: a command that ends processes that survive this one.
    `container`: the image to run; None: this machine's server. `front`: the HTTP server for clients; None: they use
    Triton's own. `gateway`: OpenAI's API. `secret`: the header value that opens closed doors. `script`: a batch script
    to submit; trtforge does not start it. `hostfile`: the nodes on which mpirun starts ranks, with their slots.
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
    script: str = field(default="", repr=False)
    hostfile: tuple[str, ...] = ()

    def process_environment(self) -> dict[str, str]:
        """The server's environment: this process's without secrets, and the launch's variables."""
        return server_environment(self.environment)

    def describe(self) -> str:
        """Commands and environment, one argument per line, or the batch script, without the secret."""
        lines = [f"# hostfile: {line}" for line in self.hostfile]
        preparation = self.installation.preparation if self.installation is not None else ()
        lines += map(_command, preparation)
        lines += [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        commands = [self.argv, *(beside.argv for beside in (self.front, self.gateway) if beside is not None)]
        text = self.script or "\n".join([*lines, *map(_command, commands)])
        return text.replace(self.secret, _HIDDEN) if self.secret else text


def _command(words: Iterable[str]) -> str:
    """A command for a shell, one word per line."""
    return " \\\n  ".join(map(shlex.quote, words))


def plan_launch(
    config: ServeConfig, repository: Path, facts: RepositoryFacts, runtime: Path, *, openai_required: bool = True
) -> Launch:
    """The launch of `repository`, with `runtime` for its files. `openai_required`: the server fails without OpenAI's
    API.

    Raises ForgeError if this launcher cannot serve it. Whether docker, MPI and GPUs are available is checked by
    `require_runnable`, so that a dry run works everywhere.
    """
    require_cluster(config, facts, config.launcher)
    launch = _planned(config, repository, facts, runtime)
    if launch.script or launch.launcher == "trtllm-serve":
        return launch
    return replace(launch, gateway=gateway_command(config, facts, required=openai_required))


def _planned(config: ServeConfig, repository: Path, facts: RepositoryFacts, runtime: Path) -> Launch:
    launcher = _chosen(config, facts)
    if launcher == "docker":
        return _docker(config, repository, facts, runtime)
    if launcher == "slurm":
        return _slurm(config, repository, facts, runtime)
    if launcher == "trtllm-serve":
        return _trtllm_serve(config, repository, facts, runtime)
    if launcher in ("mpi", "orchestrator"):
        return _mpi(config, facts, runtime, launcher)
    if facts.world_size > 1 and facts.backend == "tensorrt_llm":
        raise ForgeError(
            f"the engine has {facts.world_size} ranks, the local launcher starts one process",
            hint="Use --launcher mpi (or docker).",
        )
    installation = find_installation(runtime)
    listening, front = behind_front(config, runtime)
    server = server_arguments(config, facts, runtime / "repository", runtime.name, listening)
    return Launch(
        launcher="local",
        argv=(str(installation.program), *server, *installation.arguments),
        environment=installation.environment | model_environment(config) | {RUNTIME_VARIABLE: str(runtime)},
        installation=installation,
        view=runtime / "repository",
        front=front,
        secret=listening.secret,
    )


def require_runnable(launch: Launch, facts: RepositoryFacts) -> None:
    """Raises ForgeError if something that the launch needs is not available on this machine."""
    if launch.launcher == "slurm":
        raise ForgeError(
            "--launcher slurm prints a batch script and starts nothing itself",
            hint="Add --dry-run, write the output to a file and submit it with `sbatch FILE`.",
        )
    if launch.launcher == "trtllm-serve":
        raise ForgeError(
            "--launcher trtllm-serve prints a command and starts nothing itself: that server has none of Triton's APIs",
            hint="Add --dry-run and run its output; with --nodes it is a script for `sbatch FILE`.",
        )
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
    if launch.launcher in ("mpi", "orchestrator") and shutil.which("mpirun") is None:
        raise ForgeError("mpirun is not installed here", hint="Use NVIDIA's container, or --launcher docker.")


def _chosen(config: ServeConfig, facts: RepositoryFacts) -> ResolvedLauncher:
    if config.launcher != "auto":
        if facts.backend == "torch" and config.launcher != "local":
            raise ForgeError(
                f"--launcher {config.launcher} cannot serve the embedded engine", hint="Use --launcher local (or auto)."
            )
        if facts.backend == "llmapi" and config.launcher in ("mpi", "orchestrator"):
            raise ForgeError(
                f"--launcher {config.launcher} cannot serve the LLM API, which starts its own process for each GPU",
                hint="Use --launcher local or docker (or auto); slurm over several nodes.",
            )
        return config.launcher
    if facts.backend == "torch":
        return "local"
    if facts.backend == "llmapi":
        here = installed_version("tensorrt_llm")
        return "local" if here is not None and same_minor(here, facts.tensorrt_llm) else "docker"
    if not _TRTLLM_BACKEND.is_dir():
        return "docker"
    if facts.orchestrated:
        return "orchestrator"
    return "mpi" if facts.world_size > 1 else "local"


def _mpi(config: ServeConfig, facts: RepositoryFacts, runtime: Path, launcher: ResolvedLauncher) -> Launch:
    """The launch by mpirun. With several hosts, the repository must be at its packaged path on a shared file system."""
    listening, front = behind_front(config, runtime)
    view = None if config.hosts else runtime / "repository"
    repository = view or packaged_root(facts)
    orchestrated = launcher == "orchestrator"
    return Launch(
        launcher=launcher,
        argv=mpi_command(config, facts, repository, runtime.name, listening, orchestrated=orchestrated),
        environment=model_environment(config) | rank_environment(facts, config, orchestrated=orchestrated),
        view=view,
        front=front,
        secret=listening.secret,
        hostfile=hostfile(config, facts),
    )


def _slurm(config: ServeConfig, repository: Path, facts: RepositoryFacts, runtime: Path) -> Launch:
    containers = containers_for(facts)
    container = containers[0] if containers else None
    listening = without_front(config, container.triton if container is not None else None)
    script = slurm_script(config, repository, facts, listening, runtime.name, container)
    return Launch(launcher="slurm", argv=("sbatch",), container=container, secret=listening.secret, script=script)


def _trtllm_serve(config: ServeConfig, repository: Path, facts: RepositoryFacts, runtime: Path) -> Launch:
    require_llm_api_repository(config, facts)
    if config.nodes > 1:
        return Launch(launcher="trtllm-serve", argv=("sbatch",), script=batch_script(config, repository, facts))
    return Launch(launcher="trtllm-serve", argv=docker_command(config, repository, facts, runtime.name))


def _docker(config: ServeConfig, repository: Path, facts: RepositoryFacts, runtime: Path) -> Launch:
    containers = containers_for(facts)
    if not containers:
        raise no_container(
            facts,
            hint="Build the engine for a release that a container carries, 1.2.1 for example, serve it with "
            "--launcher local inside an image that has Triton and that release, or without Triton: "
            "--launcher trtllm-serve --dry-run prints the command.",
        )
    if config.api_key_file is not None:
        raise ForgeError(
            "--launcher docker does not support --api-key-file: clients reach Triton's own HTTP, which checks no keys",
            hint="Run `trtforge serve` inside the container, or put a gateway that checks keys in front of it.",
        )
    root = packaged_root(facts)
    listening = without_front(config, containers[0].triton)
    server = (
        ("tritonserver", *server_arguments(config, facts, root, runtime.name, listening))
        if is_one_server(facts)
        else mpi_command(config, facts, root, runtime.name, listening, orchestrated=facts.orchestrated)
    )
    variables = model_environment(config) | rank_environment(facts, config, orchestrated=facts.orchestrated)
    argv = (
        *("docker", "run", "--rm", "--name", runtime.name),
        *(word for name, value in variables.items() for word in ("--env", f"{name}={value}")),
        *("--gpus", "all", "--network", "host"),
        *("--shm-size", f"{SHARED_MEMORY_GIB}g", "--ulimit", "memlock=-1", "--ulimit", f"stack={STACK_BYTES}"),
        *("--volume", f"{mountable(repository)}:{root}:ro"),
        containers[0].image,
        *server,
    )
    cleanup = ("docker", "rm", "--force", runtime.name)
    return Launch(launcher="docker", argv=argv, cleanup=cleanup, container=containers[0], secret=listening.secret)


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
