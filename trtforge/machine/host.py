"""The interface to a machine: files below a root, programs on a PATH, packages, a driver.

All readers take a Host, so that tests can describe a machine by a directory and a few values.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Protocol

from trtforge.machine.nvml import LoadNvml, load_nvml


class Packages(Protocol):
    """The Python packages of an environment."""

    def version(self, name: str) -> str | None:
        """The installed version; None if it is not installed."""

    def requires(self, name: str) -> Sequence[str]:
        """The requirements of an installed package."""

    def cuda_of_torch(self) -> str | None:
        """The CUDA version that torch was built for, such as 12.8; None for a CPU build or no torch."""


class Installed:
    """The packages of this interpreter. Reads their metadata only: nothing is imported."""

    def version(self, name: str) -> str | None:
        """As Packages."""
        try:
            return distribution(name).version
        except PackageNotFoundError:
            return None

    def requires(self, name: str) -> Sequence[str]:
        """As Packages."""
        try:
            return distribution(name).requires or ()
        except PackageNotFoundError:
            return ()

    def cuda_of_torch(self) -> str | None:
        """See Packages; read from the assignments in torch/version.py."""
        try:
            text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text()
        except (PackageNotFoundError, OSError):
            return None
        values = (line.partition("=")[2].strip() for line in text.splitlines() if line.startswith("cuda"))
        return next((value.strip("'\"") for value in values if value not in ("", "None")), None)


DOCKER_TIMEOUT = 10.0
"""Seconds to wait for an answer of the docker daemon."""


class Run(Protocol):
    """Runs a program without a shell."""

    def __call__(self, command: Sequence[str], timeout: float) -> str:
        """Return its standard output. Raises RunError if it fails or takes longer than `timeout` seconds."""


class RunError(Exception):
    """A program failed; the message is its last line on standard error."""


def run_program(command: Sequence[str], timeout: float) -> str:
    """Run a program of this machine, as Run describes."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"no answer within {timeout:.0f} seconds") from None
    except OSError as error:
        raise RunError(error.strerror or str(error)) from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise RunError(lines[-1] if lines else f"status {done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Space:
    """A file system, in bytes."""

    total: int
    free: int


class SpaceOf(Protocol):
    """Measures the file system of a directory. Raises OSError."""

    def __call__(self, directory: Path) -> Space: ...


def space_of(directory: Path) -> Space:
    """The file system of a directory of this machine. Raises OSError."""
    usage = shutil.disk_usage(directory)
    return Space(usage.total, usage.free)


def read_stripped(path: Path) -> str | None:
    """The text of a small file without surrounding white space; None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def usable_cpus() -> int:
    """The processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Host:
    """One machine. `directory`: where builds go. `cpus`: the processors that this process may use."""

    root: Path = Path("/")
    directory: Path = Path()
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cpus: int = field(default_factory=usable_cpus)
    packages: Packages = field(default_factory=Installed)
    load_nvml: LoadNvml = load_nvml
    run: Run = run_program
    space: SpaceOf = space_of

    def text(self, path: str) -> str | None:
        """The text of a file below the root; None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return None

    def program(self, name: str) -> str | None:
        """The path of a program on the PATH; None if it does not exist."""
        return shutil.which(name, path=self.environment.get("PATH", ""))
