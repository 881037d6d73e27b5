"""A batch script for Slurm: `srun --mpi=pmix` starts one server per rank, or trtllm-llmapi-launch for the LLM API.

Sources: examples/llm-api/llm_mgmn_trtllm_serve.sh and docs of TensorRT-LLM for srun and trtllm-llmapi-launch;
--container-image and --container-mounts are options of the plug-in pyxis.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Container
from trtforge.formats.triton import RepositoryFacts
from trtforge.launch.containers import mountable
from trtforge.launch.rank_commands import nodes_of, packaged_root
from trtforge.launch.scripts import NEW_DOOR, joined, with_door
from trtforge.launch.server_arguments import (
    NO_BYTECODE,
    Listening,
    model_environment,
    server_arguments,
    worker_arguments,
)
from trtforge.serve.config import ServeConfig

_RANK = "REPLACED_BY_THE_RANK"


def slurm_script(
    config: ServeConfig,
    repository: Path,
    facts: RepositoryFacts,
    listening: Listening,
    prefix: str,
    container: Container | None,
) -> str:
    """The text of the script, for `sbatch`. Raises ForgeError for options of the HTTP front and the gateway."""
    if config.api_key_file is not None:
        raise ForgeError(
            "--launcher slurm does not support --api-key-file: clients reach Triton's own HTTP, which checks no keys",
            hint="Put a gateway that checks keys in front of it.",
        )
    if config.reasoning_parser is not None:
        raise ForgeError(
            "--launcher slurm does not support --reasoning-parser: its script starts no gateway",
            hint="Run `trtforge gateway --reasoning-parser` beside the server.",
        )
    root, nodes = packaged_root(facts), nodes_of(config)
    listener = ("tritonserver", *server_arguments(config, facts, root, f"{prefix}_0", listening))
    # A failing task ends all tasks.
    srun = ("srun", "--mpi=pmix", "--kill-on-bad-exit=1", *_container_options(container, repository, root))
    lines = [
        *batch_header(facts.world_size, nodes),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(_environment(config).items())),
        NEW_DOOR,
        "",
        *(f"{'' if word == 'srun' else '  '}{word} \\" for word in srun),
    ]
    if facts.backend == "llmapi":
        lines += [f"  trtllm-llmapi-launch {joined(listener, '    ')}", ""]
        return with_door("\n".join(lines), listening.secret)
    worker = ("tritonserver", *worker_arguments(facts, root, f"{prefix}_{_RANK}"))
    ranks = [
        'if [ "$SLURM_PROCID" -eq 0 ]; then',
        f"  exec {joined(listener, '    ')}",
        "else",
        f"  exec {joined(worker, '    ')}".replace(_RANK, "${SLURM_PROCID}"),
        "fi",
    ]
    return with_door("\n".join([*lines, "  bash -c '", *ranks, "'", ""]), listening.secret)


def batch_header(tasks: int, nodes: int) -> list[str]:
    """The first lines of a script for `sbatch`: one task per GPU, the same number on each node."""
    wanted = {"job-name": "trtforge", "nodes": nodes, "ntasks": tasks}
    wanted |= {"ntasks-per-node": tasks // nodes, "gpus-per-node": tasks // nodes}
    return ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in wanted.items())]


def _environment(config: ServeConfig) -> dict[str, str]:
    return model_environment(config) | NO_BYTECODE


def _container_options(container: Container | None, repository: Path, root: Path) -> Iterable[str]:
    """Options that run the tasks in the release's image, with the repository at its packaged path."""
    if container is None:
        return
    registry, _, image = container.image.partition("/")
    yield f"--container-image={shlex.quote(f'{registry}#{image}')}"
    mount = f"{mountable(repository, ':,')}:{root}:ro"
    yield f"--container-mounts={shlex.quote(mount)}"
