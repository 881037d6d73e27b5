"""The driver, the GPUs and their links, on drivers that are made up."""

from pathlib import Path

import pytest

from tests.machine.hosts import (
    CPU_ONLY,
    GIB,
    FakeGpu,
    FakeNvml,
    FakePackages,
    make_host,
    on_tensorrt,
    one,
    recipe,
    report_on,
)
from trtforge.doctor.finding import Finding
from trtforge.doctor.needs import needs_of


def test_gpus_are_described(tmp_path: Path) -> None:
    nvml = FakeNvml([FakeGpu(used=2 * GIB), FakeGpu("NVIDIA L4", (8, 9), 24 * GIB, mig=3)])
    report = report_on(make_host(tmp_path, nvml=nvml, packages=FakePackages(cuda="12.8")))
    assert one(report, "driver") == Finding("driver", "ok", "590.44.01")
    assert one(report, "GPU 0").found == "NVIDIA H100 80GB HBM3; SM 90; 80 GiB, 2 GiB used"
    assert one(report, "GPU 1").found == "NVIDIA L4; SM 89; 24 GiB, 0 MiB used; MIG with 3 instances"
    assert one(report, "GPU links").found == "all pairs over NVLink"
    assert report.problems == ()


def test_busy_gpu_is_a_warning(tmp_path: Path) -> None:
    report = report_on(make_host(tmp_path, nvml=FakeNvml([FakeGpu(used=70 * GIB)])))
    assert one(report, "GPU 0").status == "warning"
    assert "the KV cache gets a share of the free memory" in one(report, "GPU 0").found


def test_gpu_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    report = report_on(make_host(tmp_path, nvml=FakeNvml([FakeGpu(), FakeGpu(broken=True)])))
    assert [finding.name for finding in report.problems] == ["GPU 1"]
    assert report.problems[0].found == "does not answer: GPU is lost"


def test_mig_without_instances_is_a_problem(tmp_path: Path) -> None:
    report = report_on(make_host(tmp_path, nvml=FakeNvml([FakeGpu(mig=0)])))
    assert "MIG is enabled without an instance" in one(report, "GPU 0").found
    assert one(report, "GPU 0").status == "problem"


def test_mig_cannot_be_joined(tmp_path: Path) -> None:
    nvml = FakeNvml([FakeGpu(mig=2), FakeGpu(mig=2)])
    report = report_on(make_host(tmp_path, nvml=nvml, programs={"docker": '{"nvidia":{}}'}), on_tensorrt(tp=2))
    assert "tp and pp cannot span MIG instances" in one(report, "GPU 0").found


def test_gpu_without_driver_is_a_problem(tmp_path: Path) -> None:
    device = "sys/bus/pci/devices/0000:3b:00.0"
    files = {f"{device}/vendor": "0x10de\n", f"{device}/class": "0x030200\n"}
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY, files=files))
    assert one(report, "driver").status == "problem"
    assert "its driver is not usable: NVML Shared Library Not Found" in one(report, "driver").found


def test_broken_gpu_does_not_matter_to_a_recipe_for_the_cpu(tmp_path: Path) -> None:
    needs = needs_of(recipe(engine={"backend": "torch", "device": "cpu"}))
    report = report_on(make_host(tmp_path, nvml=FakeNvml([FakeGpu(broken=True)])), needs)
    assert one(report, "GPU 0").status == "warning"
    assert report.problems == ()


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (dvs-builder)\n",
    ],
)
def test_missing_library_is_no_crash(tmp_path: Path, text: str) -> None:
    report = report_on(make_host(tmp_path, nvml=None, files={"proc/driver/nvidia/version": text}), image="26.05")
    assert one(report, "driver").status == "unknown"
    assert one(report, "driver").todo == "pip install nvidia-ml-py"
    assert one(report, "image").found.endswith("needs driver 590.44.01 or later, installed is 535.104.05")


def test_torch_newer_than_the_driver_is_a_problem(tmp_path: Path) -> None:
    nvml = FakeNvml([FakeGpu()], driver="550.54.15")
    report = report_on(make_host(tmp_path, nvml=nvml, packages=FakePackages(cuda="13.0")))
    assert one(report, "driver").found == (
        "550.54.15; the installed torch is built for CUDA 13.0, which needs 580.65.06 or later"
    )
    assert report_on(make_host(tmp_path, nvml=nvml, packages=FakePackages(cuda="12.8"))).problems == ()


def test_cpu_build_of_torch_leaves_a_gpu_unused(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()]), programs={"docker": '{"nvidia":{}}'})
    assert one(report_on(host), "torch on the GPU").status == "warning"
    on_cuda = needs_of(recipe(engine={"backend": "torch", "device": "cuda"}))
    assert one(report_on(host, on_cuda), "torch on the GPU").status == "problem"
    assert one(report_on(host, on_tensorrt()), "torch on the GPU").status == "ok"


def test_hidden_gpus_do_not_count(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    report = report_on(
        make_host(tmp_path, nvml=nvml, environment=environment, programs={"docker": '{"nvidia":{}}'}),
        on_tensorrt(tp=2),
    )
    assert one(report, "GPU 0").found.endswith("hidden by CUDA_VISIBLE_DEVICES")
    assert one(report, "GPU count").found == "1 usable, mine needs 2 (tp * pp)"
    assert one(report, "GPU count").status == "problem"


@pytest.mark.parametrize(
    ("nvlink", "read", "status", "found"),
    [(0, 0, "ok", "over NVLink"), (6, 0, "ok", "peer to peer over PCIe"), (6, 1, "warning", "without peer access")],
)
def test_links_are_told(tmp_path: Path, nvlink: int, read: int, status: str, found: str) -> None:
    nvml = FakeNvml([FakeGpu()] * 2, nvlink=nvlink, read=read)
    report = report_on(make_host(tmp_path, nvml=nvml, programs={"docker": '{"nvidia":{}}'}), on_tensorrt(tp=2))
    assert one(report, "GPU links") == Finding(
        "GPU links", one(report, "GPU links").status, f"all pairs {found}", one(report, "GPU links").todo
    )
    assert one(report, "GPU links").status == status
