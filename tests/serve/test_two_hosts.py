"""Ranks on two hosts: two network namespaces with names and addresses of their own, and a real mpirun between them.

`trtforge serve` runs on the first one. The server is a stand-in that says where it is and waits; TensorRT-LLM, GPUs and
Triton are not needed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import tensorrt_engine
from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from trtforge.machine.processes import stat_of
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

STANDIN = """#!/usr/bin/env python3
import json, os, signal, socket, sys
rank = os.environ["OMPI_COMM_WORLD_RANK"]
said = {"rank": int(rank), "host": socket.gethostname(), "pid": os.getpid(), "argv": sys.argv[1:],
        "url": os.environ["TRTFORGE_GRPC_URL"], "network": os.readlink("/proc/self/ns/net")}
def fail(*_):
    print(f"E1122 10:00:00.000000 1 model.cc:9] rank {rank}: out of memory", file=sys.stderr, flush=True)
    os._exit(1)
signal.signal(signal.SIGUSR1, fail)  # before the test can know of this rank
draft = os.path.join(os.environ["SAID"], f".{rank}")
with open(draft, "w") as file:
    json.dump(said, file)
os.rename(draft, os.path.join(os.environ["SAID"], f"rank{rank}.json"))
while True:
    signal.pause()
"""
AGENT = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
host=$1; shift
unset TRTFORGE_GRPC_URL PYTHONDONTWRITEBYTECODE  # ssh passes none of them on
exec ip netns exec {second} unshare --uts sh -c "hostname $host && exec sh -c '$*'"
"""
PROGRAM = """
import sys
from pathlib import Path
from trtforge.cli.app import main
from trtforge.serve import host_checks, launchers
launchers._TRTLLM_BACKEND = Path("/")
launchers._gpu_count = lambda: 2
host_checks.visible_gpus = lambda load, chosen: None
main()
"""
Served = tuple["subprocess.Popen[bytes]", Path, list[dict[str, Any]]]
"""The process, its output, and what its ranks said of themselves."""
NAMES = "127.0.0.1 localhost\n10.213.7.1 node-a\n10.213.7.2 node-b\n"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The namespaces of node-a and node-b, joined by a cable."""
    if shutil.which("mpirun") is None or shutil.which("ip") is None:
        pytest.skip("needs mpirun and ip (Debian: openmpi-bin, iproute2)")
    first, second = (f"forge{os.getpid()}{letter}" for letter in "ab")
    try:
        ip("netns", "add", first)
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces need a privileged user")
    try:
        ip("netns", "add", second)
        ip("link", "add", f"{first}0", "netns", first, "type", "veth", "peer", "name", f"{second}0", "netns", second)
        for number, name in enumerate((first, second), 1):
            ip("-n", name, "address", "add", f"10.213.7.{number}/24", "dev", f"{name}0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"{name}0", "up")
            names = Path("/etc/netns") / name / "hosts"
            names.parent.mkdir(parents=True)
            names.write_text(NAMES)
        yield first, second
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.fixture
def served(tmp_path: Path, hosts: tuple[str, str]) -> Iterator[Served]:
    """`trtforge serve` on node-a with four ranks on both hosts, and what the ranks said of themselves."""
    repository = package(PackageConfig(), tensorrt_engine(tmp_path / "engine", 4), DEMO_MODEL, tmp_path / "repo").path
    programs, said = tmp_path / "bin", tmp_path / "said"
    programs.mkdir()
    said.mkdir()
    for name, text in (("tritonserver", STANDIN), ("agent", AGENT.format(second=hosts[1]))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SAID": str(said),
        "OMPI_MCA_plm_rsh_agent": str(programs / "agent"),
    }
    numbers = zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    ports = [word for name, port in numbers for word in (f"--{name}-port", str(port))]
    words = ["serve", str(repository), "--launcher", "mpi", "--hosts", "node-a,node-b", "--no-openai", *ports]
    start = ["ip", "netns", "exec", hosts[0], "unshare", "--uts", "sh", "-c", 'hostname node-a && exec "$@"', "sh"]
    output = tmp_path / "output"
    with output.open("w") as file:
        command = [*start, sys.executable, str(tmp_path / "program.py"), *words]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        begun = eventually(lambda: len(list(said.glob("rank*.json"))) == 4 or process.poll() is not None)
        assert begun
        assert process.poll() is None, output.read_text()
        yield process, output, [json.loads((said / f"rank{rank}.json").read_text()) for rank in range(4)]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (signal.SIGKILL, "rank 3 with PID {pid} on node node-b exited on signal 9 (Killed)"),
        (signal.SIGUSR1, "rank 3: out of memory"),
    ],
)
def test_a_rank_that_dies_on_another_host_ends_all(served: Served, number: signal.Signals, shown: str) -> None:
    process, output, ranks = served
    assert [(rank["rank"], rank["host"]) for rank in ranks] == [
        (0, "node-a"),
        (1, "node-a"),
        (2, "node-b"),
        (3, "node-b"),
    ]
    networks = [rank["network"] for rank in ranks]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert len({rank["url"] for rank in ranks}) == 1
    assert ["--allow-http=false" in rank["argv"] for rank in ranks] == [False, True, True, True]

    os.kill(ranks[3]["pid"], number)
    assert eventually(lambda: all(_has_ended(rank["pid"]) for rank in ranks))
    assert process.wait(PATIENCE) == 1
    assert shown.format(pid=ranks[3]["pid"]) in output.read_text()


def _has_ended(process: int) -> bool:
    found = stat_of(process)
    return found is None or found.ended
