"""Choose the build site: this machine if its TensorRT-LLM is the engine's release, else a container."""

from pathlib import Path

from trtforge.compile.build_site import BuildSite, ContainerSite, LocalSite
from trtforge.compile.machine import Machine
from trtforge.compile.tensorrt_llm import image_for
from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Release

NO_CONTAINER = "none"


def chosen_site(container: str | None, release: Release, machine: Machine, out: Path) -> BuildSite:
    """The build site of the engine `out` for `release`; `require_site` checks that it is usable.

    `container`: the image to build in, `none` for this machine, None to choose. Raises ForgeError if a container is
    needed and no image with the release is known.
    """
    if container == NO_CONTAINER or (container is None and machine.tensorrt_llm == release.version):
        return LocalSite()
    return ContainerSite(container or image_for(release), out)


def require_site(place: BuildSite, release: Release, machine: Machine) -> None:
    """Raise ForgeError, with the alternatives, if `machine` cannot build at `place`."""
    problem = _local_problem(release, machine)
    if isinstance(place, LocalSite) and problem is not None:
        raise ForgeError(problem, hint=f"Build in a container with --container IMAGE, {_other_ways(release)}")
    if isinstance(place, ContainerSite) and not machine.docker:
        raise ForgeError(
            f"{problem or 'A container was requested'}, and docker is not on PATH",
            hint=f"Install docker (the build then runs in {place.image}), {_other_ways(release)}",
        )
    if not machine.gpu:
        raise ForgeError(
            "No NVIDIA GPU was found, and TensorRT tunes an engine on its target GPU",
            hint=f"Build on a machine with that GPU, {_other_ways(release)}",
        )


def _local_problem(release: Release, machine: Machine) -> str | None:
    if machine.tensorrt_llm is None:
        return "TensorRT-LLM is not installed"
    if machine.tensorrt_llm != release.version:
        return f"TensorRT-LLM {machine.tensorrt_llm} is installed, the engine is for {release.version}"
    return None


def _other_ways(release: Release) -> str:
    return (
        f"run trtforge where TensorRT-LLM {release.version} is installed, print the build plan with --dry-run, or use "
        "the embedded engine with --backend torch."
    )
