"""The container that serves a repository: its image, command, environment, probes, GPUs and times.

All targets share it. NVIDIA's images run `tritonserver` like `trtforge serve --launcher docker`; the embedded engine
needs trtforge, so its image is built from a Dockerfile that is also written.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trtforge import __version__
from trtforge.core import defaults
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest
from trtforge.core.reasoning import ReasoningParser
from trtforge.deploy.probes import EXIT_MARGIN, Probes, drain_command, embedded_probes, triton_probes
from trtforge.formats.engine_target import TargetEnvironment, require_fit, unknown_origin
from trtforge.formats.releases import Container, known_containers
from trtforge.formats.triton import RepositoryFacts, read_facts
from trtforge.formats.triton_holes import hole_warning
from trtforge.launch.config import ServerConfig
from trtforge.launch.containers import containers_for, is_one_server, no_container
from trtforge.launch.rank_commands import mpi_command, packaged_root, rank_environment
from trtforge.launch.scripts import NEW_DOOR, joined, with_door
from trtforge.launch.server_arguments import NO_BYTECODE, Listening, model_environment, server_arguments, without_front

ANYWHERE = "0.0.0.0"
"""All interfaces of a container; its network determines who can reach it."""
HTTP, GRPC, METRICS, OPENAI = defaults.HTTP_PORT, defaults.GRPC_PORT, defaults.METRICS_PORT, 8003
KEY_FILE = Path("/run/secrets/api-keys")
REPOSITORY = "/models"
SCRATCH, CACHE = "/tmp", "/var/cache/trtforge"
EMBEDDED_IMAGE = f"trtforge-serve:{__version__}"
USER = 1000
"""The user id of `triton-server` in NVIDIA's images and of the image for the embedded engine."""

_READ_BYTES_PER_SECOND = 100_000_000  # a network volume
_LONGEST_START = 86400  # seconds: later than the end of the startup probe, whose time is configurable
_START_SECONDS = 300  # Python models, CUDA, the CPU kernels of the embedded engine
_GIB = 1 << 30
_SERVER_MEMORY, _GPU_MEMORY = 4 * _GIB, 4 * _GIB  # Python processes and shared memory; CUDA and loading
_MOST_GPUS = 16
_REASONING = "--reasoning-parser"


@dataclass(frozen=True)
class Workload:
    """A container. `root`: where the repository must be mounted; `gpus`: of the whole server, 0 for the CPU.

    `embedded`: its image has trtforge. `drains`: a command that waits for running requests, if a signal would cut them.
    `memory`: to reserve on each node; `start_seconds`: time for loading. `base`: NVIDIA's image, if known.
    """

    facts: RepositoryFacts
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    root: str
    ports: Mapping[str, int]
    probes: Probes
    memory: int
    start_seconds: int
    drain_seconds: int
    embedded: bool
    drains: tuple[str, ...] = ()
    base: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of one server, of all its nodes together."""
        return self.facts.gpu_count if self.facts.device == "cuda" else 0

    @property
    def gpu_product(self) -> str | None:
        """The GPU's name in GPU feature discovery's node labels; None if the engine records none."""
        return None if self.facts.target.gpu is None else self.facts.target.gpu.replace(" ", "-")

    @property
    def stop_seconds(self) -> int:
        """Seconds from the stop signal to the end."""
        return self.drain_seconds + EXIT_MARGIN


def plan_workload(
    manifest: Manifest,
    *,
    image: str | None,
    drain_timeout: float,
    keys: bool,
    openai: bool | None = None,
    hosts: tuple[str, ...] = (),
    probed: bool = False,
    reasoning: ReasoningParser | None = None,
) -> Workload:
    """The container of a repository. `keys`: clients must send one of the keys in KEY_FILE; `hosts`: of MPI's ranks.

    `probed`: a startup probe ends a server that does not become ready, so its own timeout does not matter; `reasoning`:
    the parser for OpenAI's API. Raises ForgeError for a release without image, and for keys that Triton itself would
    have to check.
    """
    facts = read_facts(manifest)
    config = ServerConfig(
        host=ANYWHERE,
        http_port=HTTP,
        grpc_port=GRPC,
        metrics_port=METRICS,
        drain_timeout=drain_timeout,
        hosts=hosts,
        api_key_file=KEY_FILE if keys else None,
    )
    if facts.device == "cuda" and facts.gpu_count > _MOST_GPUS and not hosts:
        raise ForgeError(
            f"the engine needs {facts.gpu_count} GPUs, more than one machine has",
            hint="Divide its ranks over nodes: `trtforge deploy kubernetes REPO OUT --nodes N`.",
        )
    bytes_ = sum(file.bytes for name, file in manifest.files.items() if "/engine/" in name)
    if facts.backend == "torch":
        found = _embedded(facts, config, image, bytes_, openai=openai is not False, probed=probed)
        return found if reasoning is None else replace(found, command=(*found.command, _REASONING, reasoning))
    if keys:
        raise ForgeError(
            "API keys are checked by trtforge's HTTP server, and NVIDIA's image runs Triton's own, which checks none",
            hint="Put a gateway that checks keys in front of it, or serve an engine of backend torch.",
        )
    if openai or reasoning is not None:
        options = [*(["--openai-port"] if openai else []), *([] if reasoning is None else [_REASONING])]
        more = "" if reasoning is None else f" {_REASONING} {reasoning}"
        command = f"`trtforge gateway --backend HOST:PORT{more}`"
        raise ForgeError(
            "OpenAI's API is a part of trtforge, which NVIDIA's image does not have",
            hint=f"Leave {' and '.join(options)} out, and run {command} with the server's gRPC port.",
        )
    return _triton(facts, config, image, bytes_)


def memory_request(facts: RepositoryFacts, engine_bytes: int, nodes: int = 1) -> int:
    """Bytes of host memory to reserve on each node; `engine_bytes`: size of the engine's files.

    Counted are 4 GiB for the server's processes and shared memory, and

    - on a GPU: 4 GiB for CUDA and loading;
    - on the CPU: 1.5 times the engine's files for the weights and a small KV cache, and, if `serving.kv_cache_tokens`
      is set, the bytes of that many tokens in the KV cache;
    - for each rank on the node: `serving.kv_cache_host_memory_bytes` and the host's cache of LoRA adapters.

    Not counted: weights that are streamed from host memory, the KV cache of a draft model that is part of the engine,
    and a KV cache whose size depends on the free memory because `serving.kv_cache_tokens` is not set.
    """
    engine = engine_bytes * 3 // 2 + facts.kv_bytes if facts.device == "cpu" else _GPU_MEMORY
    return _SERVER_MEMORY + engine + math.ceil(facts.ranks / nodes) * facts.host_bytes


def _embedded(
    facts: RepositoryFacts, config: ServerConfig, image: str | None, bytes_: int, *, openai: bool, probed: bool
) -> Workload:
    start = _START_SECONDS + math.ceil(2 * bytes_ / _READ_BYTES_PER_SECOND)  # digests are checked first
    keys = config.api_key_file is not None
    command = (
        *("trtforge", "serve", REPOSITORY, "--host", config.host),
        *("--http-port", str(HTTP), "--grpc-port", str(GRPC), "--metrics-port", str(METRICS)),
        *(("--openai-port", str(OPENAI)) if openai else ("--no-openai",)),
        *("--drain-timeout", f"{config.drain_timeout:g}", "--ready-timeout", str(_LONGEST_START if probed else start)),
        *(("--api-key-file", str(KEY_FILE)) if keys else ()),
    )
    ports = {"http": HTTP, "grpc": GRPC, "metrics": METRICS, "openai": OPENAI}
    closed = ({"grpc"} if keys else set()) | (set() if openai else {"openai"})  # gRPC without keys is loopback's
    return Workload(
        facts=facts,
        image=image or EMBEDDED_IMAGE,
        command=command,
        environment={"HOME": CACHE, "TRTFORGE_CACHE": CACHE},
        root=REPOSITORY,
        ports={name: port for name, port in ports.items() if name not in closed},
        probes=embedded_probes(facts.model("ensemble"), HTTP, KEY_FILE if keys else None),
        memory=memory_request(facts, bytes_),
        start_seconds=start,
        drain_seconds=math.ceil(config.drain_timeout),
        embedded=True,
    )


def _triton(facts: RepositoryFacts, config: ServerConfig, image: str | None, bytes_: int) -> Workload:
    container = _container(facts, None if config.hosts else image)  # for several nodes, the image is built from it
    listening = without_front(config, container.triton if container is not None else None)
    root = packaged_root(facts)
    several = not is_one_server(facts)
    variables = rank_environment(facts, config, orchestrated=facts.orchestrated)
    return Workload(
        facts=facts,
        image=image or (container.image if container is not None else ""),
        base=container.image if container is not None else "",
        command=("bash", "-c", _script(facts, config, root, listening)),
        environment=model_environment(config) | NO_BYTECODE | variables | {"HOME": SCRATCH},
        root=str(root),
        ports={"http": HTTP, "grpc": GRPC, "metrics": METRICS},
        probes=triton_probes(facts.model("ensemble"), HTTP, METRICS),
        memory=memory_request(facts, bytes_, nodes=max(1, len(config.hosts))),
        start_seconds=_START_SECONDS + math.ceil(bytes_ / _READ_BYTES_PER_SECOND),
        drain_seconds=math.ceil(config.drain_timeout),
        embedded=False,
        drains=drain_command(METRICS, math.ceil(config.drain_timeout)) if several else (),
        warnings=_warnings(facts, container),
    )


def _warnings(facts: RepositoryFacts, container: Container | None) -> tuple[str, ...]:
    """The warnings of `trtforge serve`. Raises ForgeError if the engine cannot run in the image."""
    if container is None:
        return ()
    fit: tuple[str | None, ...] = ()
    if facts.backend == "tensorrt_llm":
        fit = (unknown_origin(facts.target), *require_fit(facts.target, TargetEnvironment.of_container(container)))
    return tuple(filter(None, (*fit, hole_warning(container.triton, front=False, opened=()))))


def _container(facts: RepositoryFacts, image: str | None) -> Container | None:
    """The image's entry in the release data; None for an image that is not NVIDIA's."""
    if image is not None:
        return next((each for each in known_containers() if each.image == image), None)
    containers = containers_for(facts)
    if not containers:
        raise no_container(facts, hint="Name an image that has Triton and that release with --image.")
    return containers[0]


def _script(facts: RepositoryFacts, config: ServerConfig, root: Path, listening: Listening) -> str:
    """The container's script: creates the secret of closed endpoints, then replaces the shell by the server."""
    command = (
        ("tritonserver", *server_arguments(config, facts, root, "trtforge", listening))
        if is_one_server(facts)
        else mpi_command(config, facts, root, "trtforge", listening, orchestrated=facts.orchestrated)
    )
    return with_door(f"{NEW_DOOR}\nexec {joined(command, '  ')}\n", listening.secret)
