"""What `trtforge deploy` writes for NVIDIA's image, run here: the real Triton, its probe, its metrics, its end."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from tests.serve.test_launchers import tensorrt_repository
from trtforge.core.manifest import open_artifact
from trtforge.deploy import metrics
from trtforge.deploy.probes import drain_command
from trtforge.deploy.workload import Workload, plan_workload
from trtforge.engine_process.rendezvous import RUNTIME_VARIABLE
from trtforge.serve.installation import find_installation
from trtforge.serve.probe import health


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    """Of a release before 25.06, whose options the Triton of the wheel knows."""
    repository = tensorrt_repository(tmp_path, version="0.17.0.post1")
    return plan_workload(open_artifact(repository, "repository"), image=None, drain_timeout=5, keys=False)


@pytest.fixture
def server(
    workload: Workload, fake_repository: Path, tmp_path: Path
) -> Iterator[tuple[dict[str, int], "subprocess.Popen[bytes]"]]:
    """The container's command and environment, with a repository, ports of this machine, and the wheel's Triton.

    The repository is a copy: it is not mounted read-only here, and the Python in the wheel's backend compiles into it.
    """
    place, repository = tmp_path / "container", tmp_path / "copy"
    place.mkdir(mode=0o700)
    shutil.copytree(fake_repository, repository)
    installation = find_installation(place)
    installation.prepare()
    program = place / "tritonserver"
    program.write_text(f'#!/bin/sh\nexec {installation.program} "$@" {" ".join(installation.arguments)}\n')
    program.chmod(0o755)
    ports = dict(zip(workload.ports, free_ports(3), strict=True))
    shell, option, script = workload.command
    script = script.replace("0.0.0.0", "127.0.0.1").replace("=/models", f"={repository}")
    for name, port in ports.items():
        script = script.replace(f"-port={workload.ports[name]}", f"-port={port}")
    environment = {**os.environ, **workload.environment, **installation.environment, RUNTIME_VARIABLE: str(place)}
    environment |= {"PATH": f"{place}:{installation.environment['PATH']}"}
    process = subprocess.Popen([shell, option, script], env=environment, stderr=subprocess.DEVNULL)
    try:
        eventually(
            lambda: process.poll() is not None or health(f"127.0.0.1:{ports['http']}", "ready", 1) == HTTPStatus.OK
        )
        yield ports, process
    finally:
        process.kill()
        process.wait()


def test_the_containers_command_probe_and_drain_run_with_the_real_triton(
    workload: Workload, server: tuple[dict[str, int], "subprocess.Popen[bytes]"]
) -> None:
    ports, process = server
    assert process.poll() is None
    program = workload.probes.ready[2].replace(str(workload.ports["http"]), str(ports["http"]))
    subprocess.run([sys.executable, "-c", program], check=True)
    unknown = program.replace("/ensemble/", "/absent/")
    assert subprocess.run([sys.executable, "-c", unknown], stderr=subprocess.DEVNULL, check=False).returncode == 1
    _, option, drain = drain_command(ports["metrics"], 5)
    subprocess.run([sys.executable, option, drain.replace("time.sleep(5)", "pass")], check=True)
    answer = httpx.post(f"http://127.0.0.1:{ports['http']}/v2/repository/index", timeout=PATIENCE)
    assert answer.status_code == HTTPStatus.FORBIDDEN
    text = httpx.get(f"http://127.0.0.1:{ports['metrics']}/metrics", timeout=PATIENCE).text
    exported = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    named = {name for name in vars(metrics).values() if isinstance(name, str) and re.fullmatch(r"nv_[a-z_]+", name)}
    assert len(named) == 10
    assert named - exported == {metrics.GPU_USE, metrics.GPU_MEMORY}, "those that a machine without GPUs has not"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
