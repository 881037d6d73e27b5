"""The driver, the GPUs and the links between them, checked against what the engine needs."""

from collections.abc import Iterator
from dataclasses import replace

from trtforge.core.errors import ForgeError
from trtforge.doctor.finding import Finding, Status, gib
from trtforge.doctor.needs import Needs
from trtforge.doctor.versions import at_least, numbers
from trtforge.machine.host import Host
from trtforge.machine.nvml import VISIBLE_DEVICES, DriverFacts, GpuFacts, read_driver
from trtforge.machine.proc import has_nvidia_gpu, kernel_driver
from trtforge.plan.gpus import GPUS, Gpu, require_formats

_BUSY = 0.1
_DRIVER_OF_CUDA = {13: "580.65.06", 12: "525.60.13", 11: "450.80.02"}
"""The oldest driver on which a program of this major CUDA version starts (CUDA release notes, minor compatibility)."""


def gpu_findings(host: Host, needs: Needs) -> Iterator[Finding]:
    """The GPU that the recipe names, the driver, each GPU, whether there are enough, and the links between them.

    For a recipe that runs on the CPU, problems with GPUs are only warnings.
    """
    cpu_only = needs.recipe is not None and not needs.gpus
    for finding in _findings(host, needs):
        yield replace(finding, status="warning") if cpu_only and finding.status == "problem" else finding


def _findings(host: Host, needs: Needs) -> Iterator[Finding]:
    if needs.target is not None and needs.backend == "tensorrt_llm":
        yield _target(needs.target, needs)
    try:
        nvml = host.load_nvml()
    except ImportError:
        yield _without_library(host, needs)
        return
    try:
        driver = read_driver(nvml)
    except nvml.NVMLError as error:
        yield _without_driver(host, needs, str(error))
        return
    yield _driver(host, driver)
    if host.packages.version("torch") is not None and host.packages.cuda_of_torch() is None:
        yield _torch_without_cuda(needs)
    visible = driver.visible(host.environment.get(VISIBLE_DEVICES))
    for index, said in driver.failed.items():
        todo = "Reset the GPU or reboot; `dmesg` names the fault (Xid)."
        yield Finding(f"GPU {index}", "problem", f"does not answer: {said}", todo)
    for gpu in driver.gpus:
        yield _gpu(gpu, needs, visible=gpu.index in visible)
    if needs.gpus:
        yield _count(needs, sum(gpu.index in visible for gpu in driver.gpus))
    if len(driver.gpus) > 1:
        yield _links(driver, needs)


def driver_version(host: Host) -> str | None:
    """The version of the driver; None if there is none or it does not work."""
    try:
        nvml = host.load_nvml()
    except ImportError:
        return kernel_driver(host)
    try:
        return read_driver(nvml).version
    except nvml.NVMLError:
        return None


def _target(gpu: Gpu, needs: Needs) -> Finding:
    """Whether the recipe's formats run on its target GPU, which may be in another machine."""
    try:
        require_formats(gpu, needs.quantization)
    except ForgeError as error:
        return Finding("target GPU", "problem", error.message, error.hint)
    return Finding("target GPU", "ok", f"{gpu.name} runs the recipe's formats")


def _without_library(host: Host, needs: Needs) -> Finding:
    version = kernel_driver(host)
    if version is None:
        return _without_driver(host, needs, "no driver")
    return Finding(
        "driver",
        "unknown",
        f"{version}; its GPUs cannot be listed without nvidia-ml-py",
        "pip install nvidia-ml-py",
    )


def _without_driver(host: Host, needs: Needs, said: str) -> Finding:
    if has_nvidia_gpu(host) or kernel_driver(host) is not None:
        todo = "Install or reload the driver; in a container, start it with --gpus all."
        return Finding("driver", "problem", f"there is an NVIDIA GPU, but its driver is not usable: {said}", todo)
    if needs.gpus:
        found = f"no NVIDIA GPU and no driver ({said}); {needs.recipe} needs {needs.gpus} GPU(s)"
        todo = "Use a machine that has them, or engine.backend torch with engine.device cpu."
        return Finding("driver", "problem", found, todo)
    return Finding("driver", "ok", "no NVIDIA GPU; the embedded engine runs on the CPU")


def _driver(host: Host, driver: DriverFacts) -> Finding:
    cuda = host.packages.cuda_of_torch()
    oldest = _DRIVER_OF_CUDA.get(numbers(cuda)[0]) if cuda is not None else None
    if oldest is not None and not at_least(driver.version, oldest):
        found = f"{driver.version}; the installed torch is built for CUDA {cuda}, which needs {oldest} or later"
        return Finding("driver", "problem", found, "Update the driver, or install a torch for an older CUDA version.")
    return Finding("driver", "ok", driver.version)


def _torch_without_cuda(needs: Needs) -> Finding:
    """The finding that torch cannot use the GPU. TensorRT-LLM's container has its own torch."""
    stops = needs.backend == "torch" and needs.gpus > 0
    return Finding(
        "torch on the GPU",
        "problem" if stops else "ok" if needs.backend == "tensorrt_llm" else "warning",
        "the installed torch is a CPU build: the embedded engine does not use the GPU",
        "" if needs.backend == "tensorrt_llm" else "Install torch's build for the driver's CUDA version.",
    )


def _gpu(gpu: GpuFacts, needs: Needs, *, visible: bool) -> Finding:
    status, remark, todo = _judged(gpu, needs)
    facts = [gpu.name, f"SM {gpu.sm}" if gpu.sm is not None else "SM unknown"]
    if gpu.memory is not None:
        facts.append(f"{gib(gpu.memory)}, {gib(gpu.used or 0)} used")
    if gpu.mig is not None:
        facts.append(f"MIG with {gpu.mig} instances")
    if not visible:
        return Finding(f"GPU {gpu.index}", "ok", "; ".join([*facts, "hidden by CUDA_VISIBLE_DEVICES"]))
    return Finding(f"GPU {gpu.index}", status, "; ".join([*facts, *([remark] if remark else [])]), todo)


def _judged(gpu: GpuFacts, needs: Needs) -> tuple[Status, str, str]:
    """Status, remark and advice for one GPU; the most severe problem decides."""
    if gpu.mig == 0:
        return "problem", "MIG is enabled without an instance", "Create one (nvidia-smi mig -cgi) or disable MIG."
    if gpu.mig is not None and needs.gpus > 1:
        return "problem", "tp and pp cannot span MIG instances", "Disable MIG."
    if needs.backend == "tensorrt_llm" and gpu.sm is not None:
        try:
            # Only the name and the architecture of the product matter here.
            require_formats(replace(GPUS[0], name=gpu.name, sm=gpu.sm), needs.quantization)
        except ForgeError as error:
            return "problem", error.message, error.hint
        if needs.target is not None and needs.target.sm != gpu.sm:
            remark = f"the recipe builds for {needs.target.name} (SM {needs.target.sm})"
            return "problem", remark, "An engine runs on the architecture it was built for: change engine.target.gpu."
    if gpu.memory is None or gpu.used is None:
        return "ok", "", ""
    each = needs.weights // needs.ranks if needs.gpus and needs.weights is not None else 0
    remark = f"a rank's weights take about {gib(each)}"
    if each > gpu.memory:
        return "problem", remark, "Split over more GPUs (tp, pp) or quantise further."
    if each > gpu.memory - gpu.used:
        return "problem", remark, "End the processes on it: `nvidia-smi` names them."
    if gpu.used > _BUSY * gpu.memory:
        remark = "the KV cache gets a share of the free memory"
        return "warning", remark, "End the processes on it if they are not needed: `nvidia-smi` names them."
    return "ok", "", ""


def _count(needs: Needs, usable: int) -> Finding:
    found = f"{usable} usable, {needs.recipe} needs {needs.gpus} (tp * pp)"
    if usable >= needs.gpus:
        return Finding("GPU count", "ok", found)
    return Finding("GPU count", "problem", found, "Lower parallel.tp or parallel.pp, or use a machine with more GPUs.")


def _links(driver: DriverFacts, needs: Needs) -> Finding:
    kinds = {kind: [pair for pair, link in driver.links.items() if link == kind] for kind in set(driver.links.values())}
    found = "; ".join(f"{_pairs(pairs, len(driver.links))} {_LINKED[kind]}" for kind, pairs in sorted(kinds.items()))
    if "none" in kinds and needs.gpus > 1:
        todo = "Prefer pp to tp here, and NCCL's all-reduce to the custom one."
        return Finding("GPU links", "warning", found, todo)
    return Finding("GPU links", "unknown" if "unknown" in kinds else "ok", found)


_LINKED = {
    "NVLink": "over NVLink",
    "PCIe": "peer to peer over PCIe",
    "none": "without peer access",
    "unknown": "not reported by the driver",
}


def _pairs(pairs: list[tuple[int, int]], every: int) -> str:
    if len(pairs) == every:
        return "all pairs"
    return ", ".join(f"{first}-{second}" for first, second in pairs)
