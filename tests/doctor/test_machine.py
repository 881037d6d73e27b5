"""Whether a machine is fit, on machines that are made up: a root directory, a driver, packages, programs."""

from pathlib import Path

from tests.machine.hosts import (
    CPU_ONLY,
    FakeGpu,
    FakeNvml,
    FakePackages,
    make_host,
    one,
    report_on,
)


def test_machine_without_gpu_is_fit_for_the_embedded_engine(tmp_path: Path) -> None:
    report = report_on(make_host(tmp_path, nvml=CPU_ONLY))
    assert report.problems == ()
    assert {finding.status for finding in report.findings} == {"ok"}
    assert one(report, "driver").found == "no NVIDIA GPU; the embedded engine runs on the CPU"
    assert one(report, "Triton").found == "/venv/bin/tritonserver of nvidia-pytriton 0.7.0"
    values = report.as_json()
    assert (values["recipe"], values["fit"]) == (None, True)
    assert values["findings"][0] == {
        "name": "driver",
        "status": "ok",
        "found": "no NVIDIA GPU; the embedded engine runs on the CPU",
        "todo": "",
    }


def test_nothing_is_left_open_in_the_driver(tmp_path: Path) -> None:
    nvml = FakeNvml([FakeGpu(broken=True), FakeGpu()])
    report_on(make_host(tmp_path, nvml=nvml, packages=FakePackages(cuda="12.8")))
    assert nvml.opened == 0
