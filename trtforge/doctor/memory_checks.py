"""Compares host memory, shared memory, disk and processors with the needs of a build and its server."""

from collections.abc import Iterator
from pathlib import Path

from trtforge.doctor.finding import Finding, Status, gib
from trtforge.doctor.needs import Needs
from trtforge.launch.containers import SHARED_MEMORY_GIB
from trtforge.machine.cgroups import read_cpu_quota
from trtforge.machine.compiler import find_compiler
from trtforge.machine.host import Host, Space
from trtforge.machine.memory import read_memory
from trtforge.machine.processor import read_instruction_sets

PYTHON_MODEL_SHM = 64 << 20
"""Shared memory of one instance of a Python model (Triton server issue #6195)."""

_SERVER_MEMORY = 1 << 30
_LITTLE_DISK = 1 << 30
_COPIES = 3
_LISTED = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm")
_VECTORS = ("avx2", "asimd")


def memory_findings(host: Host, needs: Needs, *, in_container: bool) -> Iterator[Finding]:
    """Memory, shared memory, disk, CPU and its compiler.

    `in_container`: the server gets a container with its own shared memory.
    """
    yield _memory(host, needs)
    yield _shared_memory(host, needs, in_container=in_container)
    yield _disk(host, needs)
    yield _cpu(host, needs)
    if needs.backend == "torch" and not needs.gpus:
        yield _compiler(host)


def _memory(host: Host, needs: Needs) -> Finding:
    memory = read_memory(host)
    if memory is None:
        return Finding("memory", "unknown", "/proc/meminfo cannot be read")
    found = f"{gib(memory.available)} available of {gib(memory.total)}"
    if memory.limit is not None and memory.limit < memory.total:
        found += f", limited to {gib(memory.limit)} by the control group"
    wanted, purpose = needs.host_memory or (_SERVER_MEMORY, "a server with a small model takes")
    compared = f"{found}; {purpose} about {gib(wanted)}"
    if memory.most < wanted:
        status: Status = "problem" if needs.recipe else "warning"
        return Finding("memory", status, compared, "Give the machine or the container more memory.")
    if memory.available < wanted:
        todo = "End other processes first, or the kernel may kill the build."
        return Finding("memory", "warning", compared, todo)
    return Finding("memory", "ok", found)


def _shared_memory(host: Host, needs: Needs, *, in_container: bool) -> Finding:
    name = "/dev/shm"
    if in_container:
        return Finding(name, "ok", f"not used: `trtforge serve` gives the container {SHARED_MEMORY_GIB} GiB of its own")
    space = _space(host, host.root / "dev/shm")
    if space is None:
        return Finding(name, "unknown", "cannot be measured")
    wanted = PYTHON_MODEL_SHM * needs.python_models
    found = f"{gib(space.free)} free of {gib(space.total)}; {needs.python_models} Python models need {gib(wanted)}"
    if space.free >= wanted:
        return Finding(name, "ok", found)
    return Finding(
        name,
        "problem",
        found,
        "Start the container with --shm-size=2g (Kubernetes: an emptyDir of medium Memory at /dev/shm)."
        if space.total < wanted
        else "Delete the files of ended servers there (triton_*), or stop running servers.",
    )


def _disk(host: Host, needs: Needs) -> Finding:
    directory = host.directory.absolute()
    name = f"disk at {directory}"
    space = _space(host, directory)
    if space is None:
        return Finding("disk", "unknown", f"{directory} cannot be measured")
    found = f"{gib(space.free)} free of {gib(space.total)}"
    if needs.weights is not None and space.free < _COPIES * needs.weights:
        wanted = f"checkpoint, engine and repository take about {gib(_COPIES * needs.weights)}"
        return Finding(name, "problem", f"{found}; {wanted}", "Free space, or build elsewhere with --out.")
    if space.free < _LITTLE_DISK:
        return Finding(name, "warning", found, "Free space, or build elsewhere with --out.")
    return Finding(name, "ok", found)


def _cpu(host: Host, needs: Needs) -> Finding:
    features, quota = read_instruction_sets(host), read_cpu_quota(host)
    count = f"{host.cpus} usable" if quota is None or quota >= host.cpus else f"{quota:.3g} of {host.cpus} by quota"
    if not features:
        return Finding("CPU", "unknown", f"{count}; instruction sets unknown")
    listed = [feature for feature in _LISTED if feature in features]
    found = f"{count}; {' '.join(listed) or 'no relevant vector instructions'}"
    if not any(feature in features for feature in _VECTORS):
        todo = "In a virtual machine, pass the host's CPU through."
        return Finding("CPU", "warning", f"{found}: torch is slow without AVX2", todo)
    usable = host.cpus if quota is None else min(host.cpus, quota)
    if needs.backend == "torch" and needs.ranks > 1 and not needs.gpus and usable < needs.ranks:
        todo = "Ranks on one processor wait for one another: lower tp and pp."
        return Finding("CPU", "warning", f"{found}; {needs.ranks} ranks share them", todo)
    return Finding("CPU", "ok", found)


def _compiler(host: Host) -> Finding:
    compiler = find_compiler(host)
    if compiler is None:
        found = "none: the embedded engine uses torch's kernels, which are slower"
        return Finding("C++ compiler", "warning", found, "Install g++ (Debian: `apt-get install g++`).")
    return Finding("C++ compiler", "ok", f"{' '.join(compiler)} compiles the CPU kernels")


def _space(host: Host, directory: Path) -> Space | None:
    try:
        return host.space(directory)
    except OSError:
        return None
