"""Checks of the hosts and nodes over which a launcher distributes the ranks."""

from trtforge.core.errors import ForgeError
from trtforge.formats.triton import RepositoryFacts
from trtforge.launch.rank_commands import nodes_of
from trtforge.serve.config import Launcher, ServeConfig


def require_cluster(config: ServeConfig, facts: RepositoryFacts, launcher: Launcher) -> None:
    """Raises ForgeError for hosts or nodes that the launcher does not support, or that do not divide the ranks."""
    if config.hosts and launcher != "mpi":
        raise ForgeError("--hosts applies only to --launcher mpi", hint="Add --launcher mpi, or leave --hosts out.")
    if config.nodes > 1 and launcher not in ("slurm", "trtllm-serve"):
        raise ForgeError(
            "--nodes applies only to --launcher slurm and trtllm-serve",
            hint="Name the hosts with --hosts A,B, or use --launcher slurm.",
        )
    nodes = nodes_of(config)
    if facts.world_size % nodes:
        raise ForgeError(
            f"{facts.world_size} ranks cannot be divided over {nodes} nodes",
            hint="Use a number of nodes that divides the ranks.",
        )
    if launcher in ("slurm", "orchestrator") and facts.backend == "torch":
        return  # the launcher itself is refused elsewhere
    if launcher == "slurm" and facts.orchestrated:
        raise ForgeError(
            "--launcher slurm starts one server per rank, but this repository needs one server for several instances",
            hint="Use --launcher orchestrator, or package it without gpu_device_ids and participant_ids.",
        )
