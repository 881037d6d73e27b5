"""In a control group with a quota, no more threads run than it gives time for."""

import os
from pathlib import Path

import pytest

from tests.machine.hosts import make_host
from trtforge.machine.cgroups import heed_quota, processors


@pytest.mark.parametrize(
    ("quota", "usable"), [("150000 100000", 2), ("200000 100000", 2), ("10000 100000", 1), ("max 100000", 16)]
)
def test_processors_are_those_of_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, usable: int
) -> None:
    """Of 16; a number that the user set stays."""
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    host = make_host(tmp_path, files={"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": f"{quota}\n"})
    assert processors(host) == usable
    heed_quota(host)
    assert os.environ["OMP_NUM_THREADS"] == "x"
    monkeypatch.delenv("OMP_NUM_THREADS")
    heed_quota(host)
    assert os.environ.get("OMP_NUM_THREADS") == (str(usable) if usable < 16 else None)
