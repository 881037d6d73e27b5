"""The driver, the GPUs and their links, as reported by NVIDIA's management library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import combinations, takewhile
from typing import Literal, Protocol, TypeVar, cast

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The environment variable that chooses GPUs for a process."""

Link = Literal["NVLink", "PCIe", "none", "unknown"]

_T = TypeVar("_T")


class MemoryInfo(Protocol):
    """A GPU's memory in bytes."""

    @property
    def total(self) -> int: ...
    @property
    def used(self) -> int: ...


class Nvml(Protocol):
    """The part of nvidia-ml-py's module `pynvml` that is used."""

    NVMLError: type[Exception]
    NVML_P2P_CAPS_INDEX_READ: int
    NVML_P2P_CAPS_INDEX_NVLINK: int
    NVML_P2P_STATUS_OK: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...
    def nvmlDeviceGetName(self, device: object) -> str: ...
    def nvmlDeviceGetCudaComputeCapability(self, device: object) -> tuple[int, int]: ...
    def nvmlDeviceGetMemoryInfo(self, device: object) -> MemoryInfo: ...
    def nvmlDeviceGetMigMode(self, device: object) -> list[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, device: object) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: object, index: int) -> object: ...
    def nvmlDeviceGetP2PStatus(self, first: object, second: object, capability: int) -> int: ...


class LoadNvml(Protocol):
    """Loads NVIDIA's management library. Raises ImportError if its Python package is not installed."""

    def __call__(self) -> Nvml: ...


def load_nvml() -> Nvml:
    """The module of nvidia-ml-py."""
    return cast(Nvml, import_module("pynvml"))


@dataclass(frozen=True)
class GpuFacts:
    """One GPU. `sm` is compute capability times ten, memory is in bytes; None if the driver does not report it.

    `mig`: the number of MIG instances; None with MIG off.
    """

    index: int
    name: str
    sm: int | None
    memory: int | None
    used: int | None
    mig: int | None


@dataclass(frozen=True)
class DriverFacts:
    """The driver and its GPUs. `failed`: GPUs that do not respond, with the driver's error."""

    version: str
    gpus: tuple[GpuFacts, ...]
    failed: Mapping[int, str]
    links: Mapping[tuple[int, int], Link]

    def visible(self, devices: str | None) -> tuple[int, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES makes visible, in its order; None: it is not set.

        If it names GPUs by UUID, all of them count as visible.
        """
        every = tuple(gpu.index for gpu in self.gpus)
        if devices is None:
            return every
        words = [word.strip() for word in devices.split(",") if word.strip()]
        if not all(word.removeprefix("-").isdecimal() for word in words):
            return every
        listed = takewhile(lambda index: index >= 0, map(int, words))  # CUDA stops at the first invalid index
        return tuple(index for index in dict.fromkeys(listed) if index in every)


def read_driver(nvml: Nvml) -> DriverFacts:
    """Query the driver. Raises `nvml.NVMLError` if there is none or it does not work."""
    nvml.nvmlInit()
    try:
        devices: dict[int, object] = {}
        failed: dict[int, str] = {}
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                devices[index] = nvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(_gpu(nvml, index, devices[index]))
            except nvml.NVMLError as error:
                devices.pop(index, None)
                failed[index] = str(error)
        links = {
            (first, second): _link(nvml, devices[first], devices[second]) for first, second in combinations(devices, 2)
        }
        return DriverFacts(_text(nvml.nvmlSystemGetDriverVersion()), tuple(gpus), failed, links)
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Nvml, index: int, device: object) -> GpuFacts:
    name = _text(nvml.nvmlDeviceGetName(device))
    capability = _asked(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(device))
    memory = _asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(device))
    mig = _asked(nvml, lambda: nvml.nvmlDeviceGetMigMode(device))
    return GpuFacts(
        index=index,
        name=name,
        sm=capability[0] * 10 + capability[1] if capability is not None else None,
        memory=memory.total if memory is not None else None,
        used=memory.used if memory is not None else None,
        mig=_mig_instances(nvml, device) if mig is not None and mig[0] else None,
    )


def _mig_instances(nvml: Nvml, device: object) -> int:
    """The number of MIG slots in use; NVML raises an error for an empty slot."""
    slots = _asked(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(device)) or 0
    used = (_asked(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, device, slot)) for slot in range(slots))
    return sum(handle is not None for handle in used)


def _link(nvml: Nvml, first: object, second: object) -> Link:
    ok = nvml.NVML_P2P_STATUS_OK
    over_nvlink = _asked(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK))
    reads = _asked(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_READ))
    if over_nvlink == ok:
        return "NVLink"
    if reads is None:
        return "unknown"
    return "PCIe" if reads == ok else "none"


def _asked(nvml: Nvml, question: Callable[[], _T]) -> _T | None:
    """The result of a query; None if this GPU or driver does not support it."""
    try:
        return question()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    """A string of the library; old releases return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
