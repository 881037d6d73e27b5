"""The container that serves a repository: NVIDIA's image of the engine's release, and what the server needs of it."""

from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Container, containers_of, containers_with, release
from trtforge.formats.triton import RepositoryFacts

SHARED_MEMORY_GIB = 2
"""Size of /dev/shm: 64 MiB for each Python model (Triton server issue #6195) and 1 GiB for NCCL fit into it."""
STACK_BYTES = 67108864
"""Limit of the stack; with locked memory unlimited, what TensorRT-LLM's documentation asks of a container."""


def containers_for(facts: RepositoryFacts) -> tuple[Container, ...]:
    """The containers with the release that serves the repository, the best first."""
    if facts.backend == "llmapi":
        return containers_with(facts.tensorrt_llm)
    return containers_of(release(facts.tensorrt_llm))


def no_container(facts: RepositoryFacts, hint: str) -> ForgeError:
    """The error for a release that no known container has."""
    return ForgeError(f"no known container has TensorRT-LLM {facts.tensorrt_llm}", hint=hint)


def is_one_server(facts: RepositoryFacts) -> bool:
    """Whether one server, without MPI, runs all ranks: the LLM API starts its own processes."""
    return facts.backend == "llmapi" or (facts.world_size == 1 and not facts.orchestrated)


def mountable(path: Path, separators: str = ":") -> Path:
    """The absolute path of what a container is to mount. Raises ForgeError if it holds one of `separators`, between
    which the option for it has its parts: docker's --volume, and with commas pyxis' --container-mounts."""
    found = path.resolve()
    if any(mark in str(found) for mark in separators):
        marks = " or a ".join({":": "colon", ",": "comma"}[mark] for mark in separators)
        raise ForgeError(
            f"{found}: containers cannot mount a path with a {marks}", hint=f"Use a path without a {marks}."
        )
    return found
