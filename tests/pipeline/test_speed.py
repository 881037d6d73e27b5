"""A build's measured speed is kept beside its report, and counts only for the repository that was measured."""

from pathlib import Path

import pytest

from tests.pipeline.records import measured
from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Identity
from trtforge.machine.host import Host
from trtforge.pipeline.speed import keep_speed, kept_speed, this_machine


def repository(build: Path, version: str) -> None:
    """A repository in a build directory."""
    identity = Identity(stage="repository", config={}, inputs={}, versions={"x": version})
    produce(build / "repository", identity, lambda directory: {})


def test_a_speed_is_kept_for_its_repository(tmp_path: Path) -> None:
    assert kept_speed(tmp_path) is None
    repository(tmp_path, "1")
    speed = measured().speed
    assert keep_speed(tmp_path, speed, "2 cores of a CPU", 0.25) == tmp_path / "bench.json"
    found = kept_speed(tmp_path)
    assert found is not None
    assert (found.speed, found.machine, found.busy) == (speed, "2 cores of a CPU", 0.25)
    repository(tmp_path, "2")
    assert kept_speed(tmp_path) is None


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    repository(tmp_path, "1")
    keep_speed(tmp_path, measured().speed, "x", None)
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ForgeError, match=r"bench\.json: 6 mistakes\n  speed is missing"):
        kept_speed(tmp_path)


def test_a_machine_in_words(tmp_path: Path) -> None:
    def no_driver() -> object:
        raise ImportError

    (tmp_path / "proc").mkdir()
    host = Host(root=tmp_path, cpus=2, load_nvml=no_driver)  # type: ignore[arg-type]
    assert this_machine(host) == "2 cores"
    (tmp_path / "proc" / "cpuinfo").write_text("processor: 0\nmodel name\t: AMD EPYC 9B14\nmodel name\t: other\n")
    assert this_machine(host) == "2 cores of AMD EPYC 9B14"
