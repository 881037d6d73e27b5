"""What the checks ask of the real machine: packages without importing them, programs without a shell."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from trtforge.machine.compiler import find_compiler
from trtforge.machine.host import Host, Installed, RunError, run_program, space_of
from trtforge.machine.nvml import Nvml, load_nvml


def test_packages_are_read_from_their_metadata() -> None:
    packages = Installed()
    assert packages.version("torch") == version("torch")
    assert packages.version("no-such-package") is None
    assert any(line.startswith("typer") for line in packages.requires("trtforge"))
    assert packages.requires("no-such-package") == ()


def test_cuda_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert Installed().cuda_of_torch() == torch.version.cuda


def test_management_library_has_what_is_asked_of_it() -> None:
    library = load_nvml()
    asked = {name for name in (*vars(Nvml), *Nvml.__annotations__) if name.lower().startswith("nvml")}
    assert len(asked) == 16
    assert [name for name in asked if not hasattr(library, name)] == []


def test_program_answers() -> None:
    assert run_program([sys.executable, "-c", "print('$HOME; true')"], timeout=PATIENCE) == "$HOME; true\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([sys.executable, "-c", "import sys; print('one', file=sys.stderr); sys.exit('two')"], "two"),
        ([sys.executable, "-c", "import os; os._exit(3)"], "status 3"),
        (["/no/such/program"], "No such file or directory"),
    ],
)
def test_program_that_fails_says_why(command: list[str], said: str) -> None:
    with pytest.raises(RunError, match=said):
        run_program(command, timeout=PATIENCE)


def test_program_that_hangs_is_ended() -> None:
    with pytest.raises(RunError, match="no answer within 0 seconds"):
        run_program([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)


def test_this_machine_can_be_described(tmp_path: Path) -> None:
    host = Host()
    assert host.cpus > 0
    assert space_of(tmp_path).free > 0
    assert host.text("proc/meminfo")
    assert host.text("no/such/file") is None
    assert Host(environment={"PATH": str(tmp_path)}).program("docker") is None


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("g++", ["g++"]),
        ("ccache g++ -O1", ["ccache", "g++", "-O1"]),
        ("'my compiler'", None),
        ("'g++", None),
        ("", ["c++"]),
    ],
)
def test_a_compiler_may_have_words_before_and_behind_it(tmp_path: Path, chosen: str, found: list[str] | None) -> None:
    for name in ("c++", "g++", "ccache"):
        (tmp_path / name).touch(mode=0o755)
    host = Host(environment={"CXX": chosen, "PATH": str(tmp_path)})
    words = find_compiler(host)
    if found is None:
        assert words is None
    else:
        assert words == (str(tmp_path / found[0]), *found[1:])
