"""Which place an engine is built in: this machine where its TensorRT-LLM is the engine's release, else a container."""

from pathlib import Path

from trtforge.compile.build_site import BuildSite, ContainerSite, LocalSite
from trtforge.compile.machine import Machine
from trtforge.compile.tensorrt_llm import image_for
from trtforge.core.errors import ForgeError
from trtforge.formats.releases import Release

NO_CONTAINER = "none"


def chosen_site(container: str | None, release: Release, machine: Machine, out: Path) -> BuildSite:
    """Where the engine `out` for `release` is built; that this can be done there is for `require_site` to say.

    `container`: the image to build in, `none` for this machine, None to choose. Raises ForgeError where a container is
    the choice and none with the release is known.
    """
    if container == NO_CONTAINER or (container is None and machine.tensorrt_llm == release.version):
        return LocalSite()
    return ContainerSite(container or image_for(release), out)


def require_site(place: BuildSite, release: Release, machine: Machine) -> None:
    """Raises ForgeError, naming the ways out, where `machine` cannot build in `place`."""
    here = _lack_of_here(release, machine)
    if isinstance(place, LocalSite) and here is not None:
        raise ForgeError(here, hint=f"Build in a container with --container IMAGE, {_other_ways(release)}")
    if isinstance(place, ContainerSite) and not machine.docker:
        raise ForgeError(
            f"{here or 'A container was asked for'}, and docker is not on PATH",
            hint=f"Install docker (the build then runs in {place.image}), {_other_ways(release)}",
        )
    if not machine.gpu:
        raise ForgeError(
            "There is no NVIDIA GPU here, and TensorRT tunes an engine on the GPU it is for",
            hint=f"Build on a machine with that GPU, {_other_ways(release)}",
        )


def _lack_of_here(release: Release, machine: Machine) -> str | None:
    if machine.tensorrt_llm is None:
        return "TensorRT-LLM is not installed here"
    if machine.tensorrt_llm != release.version:
        return f"TensorRT-LLM {machine.tensorrt_llm} is installed here, the engine is for {release.version}"
    return None


def _other_ways(release: Release) -> str:
    return (
        f"run trtforge where TensorRT-LLM {release.version} is installed, see the exact build with --dry-run, or use "
        "the embedded engine with --backend torch."
    )
