"""Ports, Triton, the container runtime and images."""

from pathlib import Path

import pytest

from tests.machine.hosts import (
    CPU_ONLY,
    NO_SOCKETS,
    PORTS,
    FakeGpu,
    FakeNvml,
    add_process,
    make_host,
    on_tensorrt,
    one,
    recipe,
    report_on,
    socket,
)
from trtforge.doctor.finding import Finding
from trtforge.doctor.needs import needs_of
from trtforge.doctor.serving_checks import Serving, Triton
from trtforge.machine.host import RunError


def test_port_in_use_names_the_process(tmp_path: Path) -> None:
    files = {
        "proc/net/tcp": NO_SOCKETS + socket(8001, 777),
        "proc/net/tcp6": NO_SOCKETS + socket(8002, 5, "0" * 32),
    }
    host = make_host(tmp_path, nvml=CPU_ONLY, files=files)
    add_process(tmp_path, 4242, "tritonserver", 777)
    report = report_on(host)
    assert one(report, "port 8000").found == "free for http"
    assert one(report, "port 8001").found == "in use by tritonserver 4242"
    assert one(report, "port 8001").todo == "Stop it (kill 4242), or serve with another --grpc-port."
    assert one(report, "port 8001").status == "warning"
    assert one(report, "port 8002").found == "in use by a process of another user"
    assert one(report_on(host, needs_of(recipe())), "port 8001").status == "problem"


@pytest.mark.parametrize(
    ("line", "free"),
    [
        (socket(8000, 1, "0100007F"), False),
        (socket(8000, 1, "0" * 16 + "FFFF00000100007F"), False),
        (socket(8000, 1, "0A00000A"), True),  # another address of this machine
        (socket(8000, 1, "0" * 24 + "01000000"), True),  # ::1
        (socket(8000, 1, state="01"), True),  # a connection
        (socket(18000, 1), True),
    ],
)
def test_only_listeners_on_loopback_count(tmp_path: Path, line: str, free: bool) -> None:
    host = make_host(tmp_path, nvml=CPU_ONLY, files={"proc/net/tcp6": NO_SOCKETS + line})
    assert (one(report_on(host), "port 8000").status == "ok") is free


def test_missing_triton_is_said(tmp_path: Path) -> None:
    serving = Serving(PORTS, Triton(None, todo="Install the serve extra."))
    host = make_host(tmp_path, nvml=CPU_ONLY)
    assert one(report_on(host, serving=serving), "Triton").status == "warning"
    finding = one(report_on(host, needs_of(recipe()), serving=serving), "Triton")
    assert (finding.status, finding.todo) == ("problem", "Install the serve extra.")


def test_version_of_the_triton_in_nvidias_container(tmp_path: Path) -> None:
    serving = Serving(PORTS, Triton("/opt/tritonserver/bin/tritonserver"))
    host = make_host(tmp_path, nvml=CPU_ONLY, files={"opt/tritonserver/TRITON_VERSION": "2.59.0\n"})
    assert one(report_on(host, serving=serving), "Triton").found == "/opt/tritonserver/bin/tritonserver 2.59.0"
    host = make_host(tmp_path, nvml=CPU_ONLY, environment={"TRITON_SERVER_VERSION": "2.60.0"})
    assert one(report_on(host, serving=serving), "Triton").found.endswith(" 2.60.0")


@pytest.mark.parametrize(
    ("programs", "status", "found"),
    [
        ({}, "problem", "neither docker nor podman"),
        ({"podman": ""}, "problem", "podman, no docker"),
        ({"docker": '{"nvidia":{"path":"x"},"runc":{}}\n'}, "ok", "with the nvidia runtime"),
        ({"docker": '{"runc":{}}\n'}, "problem", "without the nvidia runtime"),
        ({"docker": "not JSON"}, "problem", "without the nvidia runtime"),
        ({"docker": RunError("no answer within 10 seconds")}, "problem", "no answer within 10 seconds"),
    ],
)
def test_container_runtime(tmp_path: Path, programs: dict[str, str | RunError], status: str, found: str) -> None:
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()]), programs=programs)
    finding = one(report_on(host, on_tensorrt()), "container runtime")
    assert finding.status == status
    assert found in finding.found
    if not isinstance(programs.get("docker"), RunError):
        assert one(report_on(host), "container runtime").status == "ok"


def test_gpus_through_cdi(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=CPU_ONLY, programs={"docker": "{}"}, files={"etc/cdi/nvidia.yaml": ""})
    assert one(report_on(host), "container runtime").found.endswith("with GPUs through CDI")


def test_docker_is_asked_without_a_shell(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=CPU_ONLY, programs={"docker": "{}"})
    report_on(host)
    assert getattr(host.run, "commands") == [  # noqa: B009
        (str(tmp_path / "bin" / "docker"), "info", "--format", "{{json .Runtimes}}")
    ]


def test_ranks_inside_the_container_need_mpi(tmp_path: Path) -> None:
    (tmp_path / "opt/tritonserver/backends/tensorrtllm").mkdir(parents=True)
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()] * 2))
    assert one(report_on(host, on_tensorrt(tp=2)), "MPI").status == "problem"
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()] * 2), programs={"mpirun": ""})
    assert one(report_on(host, on_tensorrt(tp=2)), "MPI").status == "ok"


@pytest.mark.parametrize(
    "image", ["26.02", "26.02-trtllm-python-py3", "nvcr.io/nvidia/tritonserver:26.02-trtllm-python-py3"]
)
def test_image_is_compared_with_the_driver(tmp_path: Path, image: str) -> None:
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()], driver="580.95.05"))
    assert one(report_on(host, image=image), "image") == Finding(
        "image",
        "ok",
        "26.02-trtllm-python-py3: TensorRT-LLM 1.1.0, TensorRT 10.13.3.9; needs driver 580.95.05 or later, "
        "installed is 580.95.05",
    )


def test_driver_older_than_the_image_is_a_problem(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()], driver="580.95.05"))
    finding = one(report_on(host, image="26.05"), "image")
    assert finding.status == "problem"
    assert "26.02-trtllm-python-py3 (TensorRT-LLM 1.1.0) runs on this driver" in finding.todo


def test_image_without_a_driver_here_is_unknown(tmp_path: Path) -> None:
    finding = one(report_on(make_host(tmp_path, nvml=CPU_ONLY), image="26.05"), "image")
    assert finding.status == "unknown"
    assert finding.found.endswith("needs driver 590.44.01 or later, and none is installed")


def test_unknown_image_is_unknown(tmp_path: Path) -> None:
    finding = one(report_on(make_host(tmp_path, nvml=CPU_ONLY), image="vllm/vllm-openai:latest"), "image")
    assert finding.status == "unknown"
    assert "26.05-trtllm-python-py3" in finding.todo


def test_image_of_another_release_than_the_recipes(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=FakeNvml([FakeGpu()]), programs={"docker": '{"nvidia":{}}'})
    finding = one(report_on(host, on_tensorrt(), image="26.02"), "image")
    assert finding.status == "problem"
    assert "the recipe's engine is for 1.2.1" in finding.found
    assert one(report_on(host, on_tensorrt()), "image").status == "ok"


def test_holes_of_the_triton_here_are_told(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=CPU_ONLY)
    old = Serving(PORTS, Triton("/venv/bin/tritonserver", of_wheel=True, release="24.10"))
    finding = one(report_on(host, serving=old), "Triton vulnerabilities")
    assert finding.status == "warning"
    assert finding.found.startswith(
        "24.10: 20 known, 13 covered by the HTTP front or closed doors; clients can reach grpc-cancel-race, "
        "text-classes, CVE-2025-23317, "
    )
    new = Serving(PORTS, Triton("/opt/tritonserver/bin/tritonserver", release="26.07"))
    assert one(report_on(host, serving=new), "Triton vulnerabilities").status == "ok"
    assert not [finding for finding in report_on(host).findings if finding.name == "Triton vulnerabilities"]


def test_holes_of_an_image_are_told(tmp_path: Path) -> None:
    host = make_host(tmp_path, nvml=CPU_ONLY)
    assert one(report_on(host, image="26.07"), "image vulnerabilities").status == "ok"
    finding = one(report_on(host, image="25.06"), "image vulnerabilities")
    assert finding.status == "warning"
    assert "CVE-2025-23310, CVE-2025-23311" in finding.found
