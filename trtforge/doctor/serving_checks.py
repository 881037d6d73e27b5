"""Checks for serving: ports, a Triton server, a container runtime, and an image that the driver supports."""

from collections.abc import Iterator
from dataclasses import dataclass

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.doctor.finding import Finding, Status
from trtforge.doctor.gpu_checks import driver_version
from trtforge.doctor.needs import Needs
from trtforge.doctor.versions import at_least
from trtforge.formats.releases import Container, containers_of, known_containers
from trtforge.formats.triton_holes import holes_of, open_holes
from trtforge.machine.host import DOCKER_TIMEOUT, Host, RunError
from trtforge.machine.proc import read_listeners

_TRTLLM_BACKEND = "opt/tritonserver/backends/tensorrtllm"
_CDI = ("etc/cdi", "var/run/cdi")


@dataclass(frozen=True)
class Triton:
    """The server that `trtforge serve` would start here. `program`: None without one; `todo` then gives advice."""

    program: str | None
    of_wheel: bool = False
    todo: str = ""
    release: str | None = None


@dataclass(frozen=True)
class Serving:
    """What `trtforge serve` would use: its default ports by purpose, and its server."""

    ports: dict[str, int]
    triton: Triton


def serves_in_container(host: Host, needs: Needs) -> bool:
    """Whether the server runs in a container: only NVIDIA's image has TensorRT-LLM's backend."""
    return needs.backend == "tensorrt_llm" and not (host.root / _TRTLLM_BACKEND).is_dir()


def serving_findings(host: Host, needs: Needs, serving: Serving, image: str | None) -> Iterator[Finding]:
    """Ports, Triton, the container runtime, and the requested image or that of the recipe."""
    for purpose, port in serving.ports.items():
        yield _port(host, needs, purpose, port)
    yield _triton(host, needs, serving.triton)
    if serving.triton.release is not None and not serves_in_container(host, needs):
        yield _vulnerabilities("Triton vulnerabilities", serving.triton.release, front=True)
    yield _runtime(host, needs)
    if needs.backend == "tensorrt_llm" and needs.ranks > 1 and not serves_in_container(host, needs):
        yield _mpi(host)
    if image is not None:
        yield _image(host, needs, image)
        if (container := _container(image)) is not None:
            yield _vulnerabilities("image vulnerabilities", container.triton, front=False)
    elif serves_in_container(host, needs) and needs.release is not None:
        fitting = containers_of(needs.release)
        if fitting:
            yield _image(host, needs, fitting[0].image)
            yield _vulnerabilities("image vulnerabilities", fitting[0].triton, front=False)


def _port(host: Host, needs: Needs, purpose: str, port: int) -> Finding:
    name = f"port {port}"
    listeners = read_listeners(host, port)
    if listeners is None:
        return Finding(name, "unknown", "/proc/net/tcp cannot be read")
    if not listeners:
        return Finding(name, "ok", f"free for {purpose}")
    listener = listeners[0]
    who = f"{listener.program or 'process'} {listener.pid}" if listener.pid is not None else "a process of another user"
    stop = f"Stop it (kill {listener.pid})" if listener.pid is not None else "Stop it"
    return Finding(
        name,
        "problem" if needs.recipe else "warning",
        f"in use by {who}",
        f"{stop}, or serve with another --{purpose}-port.",
    )


def _triton(host: Host, needs: Needs, triton: Triton) -> Finding:
    if serves_in_container(host, needs):
        return Finding("Triton", "ok", "part of the container")
    if triton.program is None:
        status: Status = "problem" if needs.recipe else "warning"
        return Finding("Triton", status, "not installed", triton.todo)
    if triton.of_wheel:
        version = f"of nvidia-pytriton {host.packages.version('nvidia-pytriton')}"
    else:
        file = host.text("opt/tritonserver/TRITON_VERSION") or ""
        version = host.environment.get("TRITON_SERVER_VERSION") or file.strip()
    return Finding("Triton", "ok", f"{triton.program} {version or '(version unknown)'}")


def _vulnerabilities(name: str, release: str, *, front: bool) -> Finding:
    """Known vulnerabilities of a Triton release, and which of them clients of `trtforge serve` can reach."""
    known, left = holes_of(release), open_holes(release, front=front, opened=())
    if not left:
        return Finding(name, "ok", f"{release}: {len(known)} known, none that clients can reach")
    by = "the HTTP front or closed doors" if front else "closed doors"
    names = ", ".join(hole.name for hole in left)
    return Finding(
        name,
        "warning",
        f"{release}: {len(known)} known, {len(known) - len(left)} covered by {by}; clients can reach {names}",
        "Keep the server on a trusted network, or serve with a newer release.",
    )


def _runtime(host: Host, needs: Needs) -> Finding:
    """The finding about docker, which `trtforge serve` calls; ok without docker if the recipe needs no container."""
    name, wanted = "container runtime", serves_in_container(host, needs)
    lacking: Status = "problem" if wanted else "ok"
    docker = host.program("docker")
    if docker is None:
        podman = host.program("podman")
        if podman is not None:
            found = f"{podman}, no docker"
            return Finding(name, lacking, found, "Install podman-docker: trtforge calls `docker`." if wanted else "")
        todo = "Install docker and the NVIDIA Container Toolkit, or work inside NVIDIA's container."
        return Finding(name, lacking, "neither docker nor podman is installed", todo if wanted else "")
    try:
        answer = host.run([docker, "info", "--format", "{{json .Runtimes}}"], timeout=DOCKER_TIMEOUT)
    except RunError as error:
        found = f"{docker} does not work: {error}"
        if wanted:
            return Finding(name, "problem", found, "Start the docker daemon, or add this user to the group docker.")
        return Finding(name, "ok", f"{found}; the embedded engine needs no container")
    if "nvidia" in _runtimes(answer):
        return Finding(name, "ok", f"{docker} with the nvidia runtime")
    if any(any((host.root / directory).glob("nvidia*")) for directory in _CDI):
        return Finding(name, "ok", f"{docker} with GPUs through CDI")
    todo = "Install the NVIDIA Container Toolkit and run `nvidia-ctk runtime configure`." if wanted else ""
    return Finding(name, lacking, f"{docker}, without the nvidia runtime", todo)


def _mpi(host: Host) -> Finding:
    """The finding about mpirun, which starts a server of several ranks inside NVIDIA's container."""
    program = host.program("mpirun")
    if program is not None:
        return Finding("MPI", "ok", program)
    return Finding("MPI", "problem", "no mpirun on PATH", "Use NVIDIA's Triton image for TensorRT-LLM, which has it.")


def _runtimes(answer: str) -> frozenset[str]:
    try:
        value = parse_json(answer, "docker info", hint="")
    except ForgeError:
        return frozenset()
    return frozenset(value) if isinstance(value, dict) else frozenset()


def _image(host: Host, needs: Needs, image: str) -> Finding:
    """Whether an image suits the recipe and runs with this driver."""
    name, container = "image", _container(image)
    if container is None:
        newest = ", ".join(each.image_tag for each in known_containers()[:3])
        found = f"{image} is not a known Triton image"
        return Finding(name, "unknown", found, f"Known tags: {newest}, ...")
    holds = f"{container.image_tag}: TensorRT-LLM {container.tensorrt_llm}, TensorRT {container.tensorrt}"
    if container.confidence != "high":
        holds += " (sources differ)"
    fitting = containers_of(needs.release) if needs.release is not None else known_containers()
    if needs.release is not None and container not in fitting:
        tags = ", ".join(each.image_tag for each in fitting) or "no known image"
        todo = f"Serve an engine with the release that built it: {tags}."
        return Finding(name, "problem", f"{holds}; the recipe's engine is for {needs.release.version}", todo)
    needed, driver = f"needs driver {container.min_driver} or later", driver_version(host)
    if driver is None:
        return Finding(name, "unknown", f"{holds}; {needed}, and none is installed")
    if at_least(driver, container.min_driver):
        return Finding(name, "ok", f"{holds}; {needed}, installed is {driver}")
    older = [each for each in fitting if at_least(driver, each.min_driver)]
    instead = f" {older[0].image_tag} (TensorRT-LLM {older[0].tensorrt_llm}) runs on this driver." if older else ""
    todo = f"Update the driver.{instead} Data-centre GPUs may run the image with CUDA forward compatibility."
    return Finding(name, "problem", f"{holds}; {needed}, installed is {driver}", todo)


def _container(image: str) -> Container | None:
    """The container of an image, tag or Triton release: 26.05 means 26.05-trtllm-python-py3."""
    tag = image.rpartition("/")[2].rpartition(":")[2].partition("@")[0]
    return next((each for each in known_containers() if tag in (each.image_tag, each.triton)), None)
