"""mpirun's command for an engine of several ranks, on one host or several: leader mode and orchestrator mode.

Leader mode: one server per rank, the first of which listens. Orchestrator mode: a server starts its ranks by
MPI_Comm_spawn, which several instances or models on a host need; with `participant_ids` the ranks are started
beforehand. Source: triton_backend/scripts/launch_triton_server.py.
"""

from pathlib import Path

from trtforge.formats.triton import RepositoryFacts
from trtforge.launch.config import ServerConfig
from trtforge.launch.server_arguments import NO_BYTECODE, Listening, server_arguments, worker_arguments

_ORCHESTRATOR = "TRTLLM_ORCHESTRATOR"
_SPAWN = "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"


def packaged_root(facts: RepositoryFacts) -> Path:
    """The path of the repository on the serving machine, from its packaging."""
    return Path(facts.engine_path).parents[2]


def processes(facts: RepositoryFacts, *, orchestrated: bool) -> int:
    """Number of MPI processes that the launcher starts."""
    if not orchestrated:
        return facts.world_size
    ranks = {rank for group in facts.participants for rank in group}
    return 1 + max(ranks) if ranks else 1


def nodes_of(config: ServerConfig) -> int:
    """Number of nodes for the ranks."""
    return len(config.hosts) or config.nodes


def hostfile(config: ServerConfig, facts: RepositoryFacts) -> tuple[str, ...]:
    """The lines of a hostfile for the hosts; empty for this machine."""
    return tuple(f"{host} slots={facts.world_size // len(config.hosts)}" for host in config.hosts)


def rank_environment(facts: RepositoryFacts, config: ServerConfig, *, orchestrated: bool) -> dict[str, str]:
    """Variables that the ranks need."""
    spawning = {_SPAWN: "0"} if facts.participants else {}
    return (NO_BYTECODE if config.hosts else {}) | ({_ORCHESTRATOR: "1"} | spawning if orchestrated else {})


def mpi_command(
    config: ServerConfig,
    facts: RepositoryFacts,
    repository: Path,
    prefix: str,
    listening: Listening,
    *,
    orchestrated: bool = False,
) -> tuple[str, ...]:
    """The command that starts all servers. If one ends, mpirun ends all."""
    command = ["mpirun", "--allow-run-as-root"]
    exported: list[str] = []
    if config.hosts:
        slots = facts.world_size // len(config.hosts)
        command += ["--host", ",".join(f"{host}:{slots}" for host in config.hosts), "--map-by", "slot"]
        names = {"TRTFORGE_GRPC_URL", *rank_environment(facts, config, orchestrated=orchestrated)}
        exported = [word for name in sorted(names) for word in ("-x", name)]
    for rank in range(processes(facts, orchestrated=orchestrated)):
        command += [*exported, "-n", "1", "tritonserver"]  # exports apply to the ranks before the next colon
        if rank == 0:
            command += server_arguments(config, facts, repository, f"{prefix}_{rank}", listening)
            command += _several_models(facts) if orchestrated else ()
        else:
            command += worker_arguments(facts, repository, f"{prefix}_{rank}")
        command.append(":")
    return tuple(command[:-1])


def _several_models(facts: RepositoryFacts) -> tuple[str, ...]:
    """Options that turn off the server's own memory pools, which would take memory from ranks on the same GPUs."""
    pools = (f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(facts.gpu_count))
    return ("--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *pools)
