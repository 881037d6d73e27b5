"""The container that serves a repository: NVIDIA's image of the engine's release, and its limits."""

from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Container, containers_of, containers_with, release
from trtforge.formats.triton import RepositoryFacts

SHARED_MEMORY_GIB = 2
"""Size of /dev/shm: 64 MiB for each Python model (Triton server issue #6195) and 1 GiB for NCCL fit into it."""
STACK_BYTES = 67108864
"""Limit of the stack, which TensorRT-LLM's documentation requires of a container, with unlimited locked memory."""


def containers_for(facts: RepositoryFacts) -> tuple[Container, ...]:
    """The containers with the release that serves the repository, the best first."""
    if facts.backend == "llmapi":
        return containers_with(facts.tensorrt_llm)
    return containers_of(release(facts.tensorrt_llm))


def no_container(facts: RepositoryFacts, hint: str) -> ForgeError:
    """The error for a release without a known container."""
    return ForgeError(f"no known container has TensorRT-LLM {facts.tensorrt_llm}", hint=hint)


def is_one_server(facts: RepositoryFacts) -> bool:
    """Whether one server, without MPI, runs all ranks: the LLM API starts its own processes."""
    return facts.backend == "llmapi" or (facts.world_size == 1 and not facts.orchestrated)


def mountable(path: Path, separators: str = ":") -> Path:
    """The absolute path of a directory to mount in a container.

    Raises ForgeError if it contains one of `separators`, which separate the parts of the option: docker's --volume, and
    with commas pyxis' --container-mounts.
    """
    found = path.resolve()
    if any(mark in str(found) for mark in separators):
        marks = " or a ".join({":": "colon", ",": "comma"}[mark] for mark in separators)
        raise ForgeError(
            f"{found}: containers cannot mount a path with a {marks}", hint=f"Use a path without a {marks}."
        )
    return found
