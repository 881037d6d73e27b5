"""Memory, shared memory, disk and processors, in a made-up /proc and /sys."""

from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.machine.hosts import (
    CPU_ONLY,
    GIB,
    MIB,
    FakeGpu,
    FakeNvml,
    FakePackages,
    FakeSpace,
    make_host,
    on_tensorrt,
    one,
    recipe,
    report_on,
)
from trtforge.doctor.needs import needs_of
from trtforge.machine.host import Host


def test_control_group_of_version_2_is_respected(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/kubepods/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/kubepods/memory.current": f"{6 * GIB}\n",
        "sys/fs/cgroup/kubepods/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "sys/fs/cgroup/kubepods/pod1/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/kubepods/cpu.max": "150000 100000\n",
    }
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, files=files))
    assert one(report, "memory").found == "3 GiB available of 125 GiB, limited to 8 GiB by the control group"
    assert one(report, "CPU").found.startswith("1.5 of 16 by quota; avx2 avx512f amx_bf16")


def test_control_group_of_version_1_is_respected(tmp_path: Path) -> None:
    """In a container the group's path is the host's and does not exist."""
    files = {
        "proc/self/cgroup": "5:memory:/docker/0123\n2:cpu,cpuacct:/docker/0123\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{256 * MIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {128 * MIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, files=files))
    assert one(report, "memory").found.startswith("384 MiB available of 125 GiB, limited to 512 MiB")
    assert one(report, "memory").status == "warning"
    assert one(report, "CPU").found.startswith("2 of 16 by quota")


def test_unlimited_control_group_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, files=files))
    assert one(report, "memory").found == "114 GiB available of 125 GiB"


def test_model_larger_than_memory_is_a_problem(tmp_path: Path) -> None:
    needs = needs_of(recipe(model={"source": str(DEMO_MODEL)}))
    files = {"proc/meminfo": "MemTotal: 16384 kB\nMemAvailable: 16384 kB\n"}
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, files=files), needs)
    assert one(report, "memory").status == "problem"
    assert one(report, "memory").found.endswith("; `trtforge verify` takes about 605 MiB")
    files = {"proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 16384 kB\n"}
    assert one(report_on(make_host(tmp_path, nvml=CPU_ONLY, files=files), needs), "memory").status == "warning"


def test_machine_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    host = Host(
        root=tmp_path / "empty",
        directory=tmp_path,
        environment={},
        cpus=1,
        packages=FakePackages(),
        load_nvml=lambda: CPU_ONLY,
        space=FakeSpace(shm=None, disk=None),
    )
    report = report_on(host)
    names = ("memory", "/dev/shm", "disk", "CPU", "port 8000")
    assert {one(report, name).status for name in names} == {"unknown"}


@pytest.mark.parametrize(
    ("free", "status", "todo"),
    [
        (320 * MIB, "ok", ""),
        (319 * MIB, "problem", "Delete the files of ended servers there"),
        (63 * MIB, "problem", "Start the container with --shm-size=2g"),
    ],
)
def test_shared_memory_of_the_python_models(tmp_path: Path, free: int, status: str, todo: str) -> None:
    space = FakeSpace(shm=free, shm_total=64 * MIB if free < 64 * MIB else 8 * GIB)
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, space=space))
    assert one(report, "/dev/shm").status == status
    assert one(report, "/dev/shm").todo.startswith(todo)
    assert "5 Python models need 320 MiB" in one(report, "/dev/shm").found


def test_container_has_shared_memory_of_its_own(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()]), space=FakeSpace(shm=0), programs={"docker": '{"nvidia":{}}'})
    assert one(report_on(host, on_tensorrt()), "/dev/shm").status == "ok"
    (tmp_path / "opt/tritonserver/backends/tensorrtllm").mkdir(parents=True)
    inside = one(report_on(host, on_tensorrt()), "/dev/shm")
    assert inside.status == "problem"
    assert "4 Python models need 256 MiB" in inside.found


def test_little_disk(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=CPU_ONLY, space=FakeSpace(disk=20 * MIB))
    assert one(report_on(host), f"disk at {tmp_path}").status == "warning"
    needs = needs_of(recipe(model={"source": str(DEMO_MODEL)}))
    disk = one(report_on(host, needs), f"disk at {tmp_path}")
    assert disk.status == "problem"
    assert "checkpoint, engine and repository take about" in disk.found


def test_cpu_without_vectors_is_slow(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "flags\t\t: fpu sse2\n"}
    assert one(report_on(make_host(tmp_path, nvml=CPU_ONLY, files=files)), "CPU").status == "warning"
    files = {"proc/cpuinfo": "Features\t: fp asimd sve i8mm bf16\n"}
    assert one(report_on(make_host(tmp_path, nvml=CPU_ONLY, files=files)), "CPU").found.endswith("asimd sve bf16 i8mm")


def test_the_compiler_of_the_kernels(tmp_path: Path) -> None:
    found = one(report_on(make_host(tmp_path / "with", nvml=CPU_ONLY)), "C++ compiler")
    assert (found.status, found.found) == ("ok", f"{tmp_path / 'with' / 'bin' / 'c++'} compiles the CPU kernels")
    report = report_on(make_host(tmp_path / "without", nvml=CPU_ONLY, compiler=False))
    assert one(report, "C++ compiler").status == "warning"
    assert one(report, "C++ compiler").todo == "Install g++ (Debian: `apt-get install g++`)."
    named = make_host(tmp_path / "named", nvml=CPU_ONLY, environment={"CXX": "clang++"})
    assert one(report_on(named), "C++ compiler").status == "warning"
    assert "C++ compiler" not in {finding.name for finding in report_on(named, on_tensorrt()).findings}
