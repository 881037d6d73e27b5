"""Machines for the checks: a directory in the place of `/`, and small stand-ins for driver, packages and programs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtforge.core.recipe import Recipe
from trtforge.doctor.finding import Finding, Report
from trtforge.doctor.machine import examine
from trtforge.doctor.needs import Needs, needs_of
from trtforge.doctor.serving_checks import Serving, Triton
from trtforge.machine.host import Host, RunError, Space
from trtforge.machine.nvml import Nvml

GIB = 1 << 30
MIB = 1 << 20


class NvmlError(Exception):
    """What nvidia-ml-py raises."""


@dataclass(frozen=True)
class FakeMemory:
    total: int
    used: int


@dataclass(frozen=True)
class FakeGpu:
    """One GPU. `mig`: MIG instances, None with MIG off; `broken`: it does not answer."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory: int = 80 * GIB
    used: int = 0
    mig: int | None = None
    broken: bool = False


@dataclass
class FakeNvml:
    """The module pynvml on a machine with these GPUs. `links`: status of each capability of all pairs."""

    gpus: Sequence[FakeGpu] = ()
    driver: str = "590.44.01"
    nvlink: int = 0
    read: int = 0
    broken: str | None = None
    opened: int = 0

    NVMLError: type[Exception] = NvmlError
    NVML_P2P_CAPS_INDEX_READ: int = 0
    NVML_P2P_CAPS_INDEX_NVLINK: int = 2
    NVML_P2P_STATUS_OK: int = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise NvmlError(self.broken)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        if self.gpus[index].broken:
            raise NvmlError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetName(self, device: object) -> str:
        return _gpu(device).name

    def nvmlDeviceGetCudaComputeCapability(self, device: object) -> tuple[int, int]:
        return _gpu(device).capability

    def nvmlDeviceGetMemoryInfo(self, device: object) -> FakeMemory:
        return FakeMemory(_gpu(device).memory, _gpu(device).used)

    def nvmlDeviceGetMigMode(self, device: object) -> list[int]:
        if _gpu(device).capability < (8, 0):
            raise NvmlError("Not Supported")
        return [int(_gpu(device).mig is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: object) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: object, index: int) -> object:
        if index >= (_gpu(device).mig or 0):
            raise NvmlError("Not Found")
        return index

    def nvmlDeviceGetP2PStatus(self, first: object, second: object, capability: int) -> int:
        return self.nvlink if capability == self.NVML_P2P_CAPS_INDEX_NVLINK else self.read


def _gpu(device: object) -> FakeGpu:
    assert isinstance(device, FakeGpu)
    return device


@dataclass
class FakePackages:
    """Packages by name; `needs`: the requirement lines of some of them."""

    versions: Mapping[str, str] = field(default_factory=lambda: dict(VERSIONS))
    needs: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(NEEDS))
    cuda: str | None = None

    def version(self, name: str) -> str | None:
        return self.versions.get(name)

    def requires(self, name: str) -> Sequence[str]:
        return self.needs.get(name, ())

    def cuda_of_torch(self) -> str | None:
        return self.cuda


VERSIONS = {
    "trtforge": "0.1.0",
    "torch": "2.9.0",
    "transformers": "5.2.0",
    "tokenizers": "0.22.1",
    "numpy": "1.26.4",
    "tritonclient": "2.60.0",
    "nvidia-pytriton": "0.7.0",
}
NEEDS = {
    "trtforge": (
        "rich>=13.7",
        'numpy<2; extra == "engine"',
        'tokenizers>=0.22; extra == "engine"',
        'torch>=2.8; extra == "engine"',
        'transformers<6,>=5; extra == "engine"',
        'numpy<2; extra == "serve"',
        'tritonclient[grpc]>=2.50; extra == "serve"',
        "nvidia-pytriton==0.7.0; (platform_machine == 'x86_64') and extra == 'serve'",
        'pytest>=8; extra == "dev"',
    ),
    "nvidia-pytriton": ("numpy<2.0.0,>=1.21", "tritonclient[grpc,http]~=2.50"),
}
VERSIONS["rich"] = "14.0.0"


@dataclass
class FakePrograms:
    """Answers of programs by the name of the program; an exception is raised."""

    answers: Mapping[str, str | RunError] = field(default_factory=dict)
    commands: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, command: Sequence[str], timeout: float) -> str:
        self.commands.append(tuple(command))
        answer = self.answers[Path(command[0]).name]
        if isinstance(answer, RunError):
            raise answer
        return answer


@dataclass
class FakeSpace:
    """Free bytes of /dev/shm and of everything else; None cannot be measured."""

    shm: int | None = 8 * GIB
    shm_total: int = 8 * GIB
    disk: int | None = 500 * GIB

    def __call__(self, directory: Path) -> Space:
        free, total = (self.shm, self.shm_total) if directory.name == "shm" else (self.disk, 500 * GIB)
        if free is None:
            raise OSError("no such file system")
        return Space(total, free)


MEMINFO = "MemTotal:       131072000 kB\nMemFree:         1000000 kB\nMemAvailable:   120000000 kB\n"
CPUINFO = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 avx512f amx_bf16\n"
NO_SOCKETS = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def make_host(
    root: Path,
    *,
    nvml: FakeNvml | None = None,
    packages: FakePackages | None = None,
    programs: Mapping[str, str | RunError] | None = None,
    space: FakeSpace | None = None,
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    cpus: int = 16,
    compiler: bool = True,
) -> Host:
    """A machine that is fit for the embedded engine, with these differences. `nvml` None: nvidia-ml-py is missing."""
    defaults = {"proc/meminfo": MEMINFO, "proc/cpuinfo": CPUINFO, "proc/net/tcp": NO_SOCKETS, "proc/self/cgroup": ""}
    for name, text in (defaults | dict(files or {})).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    runner = FakePrograms(programs or {})
    for name in runner.answers:
        program = root / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.touch(mode=0o755)

    (root / "bin").mkdir(exist_ok=True)
    if compiler:
        (root / "bin" / "c++").touch(mode=0o755)

    def load_nvml() -> Nvml:
        if nvml is None:
            raise ImportError("pynvml")
        return nvml

    return Host(
        root=root,
        directory=root,
        environment={"PATH": str(root / "bin"), **(environment or {})},
        cpus=cpus,
        packages=packages or FakePackages(),
        load_nvml=load_nvml,
        run=runner,
        space=space or FakeSpace(),
    )


def socket(port: int, inode: int, address: str = "00000000", state: str = "0A") -> str:
    """A line of /proc/net/tcp."""
    ends = f"{address}:{port:04X} 00000000:0000"
    return f"   0: {ends} {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"


def add_process(root: Path, pid: int, name: str, inode: int) -> None:
    """A process that holds a socket."""
    process = root / "proc" / str(pid)
    (process / "fd").mkdir(parents=True)
    (process / "comm").write_text(f"{name}\n")
    os.symlink(f"socket:[{inode}]", process / "fd" / "7")


PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
SERVING = Serving(PORTS, Triton("/venv/bin/tritonserver", of_wheel=True))
CPU_ONLY = FakeNvml(broken="NVML Shared Library Not Found")


def recipe(**values: object) -> Recipe:
    return Recipe.parse({"name": "mine", "model": {"source": "nobody/nothing"}} | values, "test")


def on_tensorrt(tp: int = 1, quant: str = "none", gpu: str | None = None, version: str = "1.2.1") -> Needs:
    engine = {"backend": "tensorrt_llm", "target": {"gpu": gpu, "tensorrt_llm": version}}
    return needs_of(recipe(engine=engine, parallel={"tp": tp}, quantization={"format": quant}))


def report_on(host: Host, needs: Needs | None = None, image: str | None = None, serving: Serving = SERVING) -> Report:
    report = examine(host, needs or Needs(), serving, image)
    for finding in report.findings:
        assert finding.found, finding
        assert finding.todo or finding.status in ("ok", "unknown"), finding
    return report


def one(report: Report, name: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.name == name]
    return finding
