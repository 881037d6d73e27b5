"""Where the ranks of an engine are built: in local processes, or in containers of an image with TensorRT-LLM.

Each rank is one run of inside/rank.py. `trtllm-build` is not used: it builds all ranks in one run, so it has no log per
rank, continues for hours after one rank failed, and restarts all of them.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from trtforge.core.digest import text_digest
from trtforge.core.errors import ForgeError
from trtforge.machine.nvml import VISIBLE_DEVICES

BUILD_CONFIG = "build_config.json"
ENGINE = "engine"
"""In a rank's working directory: its input file, and its output directory."""

_PROGRAM = Path(__file__).parent / "inside" / "rank.py"
_PROGRAM_INSIDE = "/opt/trtforge/rank.py"


@dataclass(frozen=True)
class Run:
    """A process: its command, additional environment variables, and a command that cleans up after it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cleanup: tuple[str, ...] = ()


class BuildSite(Protocol):
    """Creates the runs that build an engine. `gpus`: GPUs to use, named as in CUDA_VISIBLE_DEVICES; None for all."""

    @property
    def name(self) -> str:
        """The site's name for messages."""

    def target(self, gpus: Sequence[str] | None) -> Run:
        """The run that prints the site's versions and GPUs (see `target` in inside/rank.py)."""

    def rank(self, rank: int, gpu: str, checkpoint: Path, directory: Path) -> Run:
        """The run that builds a rank of `checkpoint`; its working directory is `directory`, which has BUILD_CONFIG."""


@dataclass(frozen=True)
class LocalSite:
    """Processes of this machine's Python, which has TensorRT-LLM."""

    name: str = "this machine"

    def target(self, gpus: Sequence[str] | None) -> Run:
        """See BuildSite; the GPUs are already set in the environment."""
        return Run((sys.executable, str(_PROGRAM), "target"))

    def rank(self, rank: int, gpu: str, checkpoint: Path, directory: Path) -> Run:
        """See BuildSite."""
        return Run((sys.executable, str(_PROGRAM), *_build(rank, checkpoint)), {VISIBLE_DEVICES: gpu})


@dataclass(frozen=True)
class ContainerSite:
    """Containers of `image`, named after the engine `out`.

    Each container has a unique name, so that one left by a killed client does not conflict with the next run.
    """

    image: str
    out: Path

    @property
    def name(self) -> str:
        """See BuildSite."""
        return f"a container of {self.image}"

    def target(self, gpus: Sequence[str] | None) -> Run:
        """See BuildSite."""
        return self._run("target", "all" if gpus is None else _devices(gpus), (), ("target",))

    def rank(self, rank: int, gpu: str, checkpoint: Path, directory: Path) -> Run:
        """See BuildSite. Both directories have the same path inside the container."""
        options = (
            *("--mount", mount(checkpoint, read_only=True)),
            *("--mount", mount(directory)),
            *("--workdir", str(directory.absolute())),
        )
        return self._run(f"rank{rank}", _devices([gpu]), options, _build(rank, checkpoint))

    def _run(self, role: str, gpus: str, options: Sequence[str], arguments: Sequence[str]) -> Run:
        name = f"trtforge-{text_digest(str(self.out.absolute()))[:12]}-{role}-{token_hex(4)}"
        argv = (
            *docker_run(gpus),
            *("--name", name),
            *("--mount", mount(_PROGRAM, inside=_PROGRAM_INSIDE, read_only=True)),
            *options,
            *(self.image, "python3", _PROGRAM_INSIDE, *arguments),
        )
        return Run(argv, cleanup=("docker", "rm", "--force", name))


def docker_run(gpus: str) -> tuple[str, ...]:
    """The common part of `docker run`; files are written as the current user.

    Shared memory and locked memory follow NVIDIA's container notes for NCCL. `--init` forwards signals. A user who is
    unknown to the image needs a name and a home directory (`getpass.getuser` in torch).
    """
    return (
        *("docker", "run", "--rm", "--init", "--gpus", gpus),
        *("--user", f"{os.getuid()}:{os.getgid()}", "--env", "USER=trtforge", "--env", "HOME=/tmp"),
        *("--shm-size", "1g", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"),
    )


def mount(path: Path, *, inside: str | None = None, read_only: bool = False) -> str:
    """The value of --mount for `path`, at the same path inside by default. Raises ForgeError for a comma."""
    if "," in str(path):
        raise ForgeError(f"{path}: docker cannot mount a path with a comma", hint="Use a path without a comma.")
    source = path.absolute()
    return f"type=bind,source={source},target={inside or source}" + (",readonly" if read_only else "")


def chosen_gpus(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs in CUDA_VISIBLE_DEVICES; None if it is not set."""
    value = environment.get(VISIBLE_DEVICES)
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def lanes(ranks: Sequence[int], gpus: Sequence[str], workers: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """For each of at most `workers` workers, its GPU and the ranks that it builds one after the other.

    The assignment is that of `trtllm-build --workers`.
    """
    count = min(workers, len(gpus), len(ranks))
    return tuple((gpus[lane], tuple(ranks[lane::count])) for lane in range(count))


def _build(rank: int, checkpoint: Path) -> tuple[str, ...]:
    return ("build", str(checkpoint.absolute()), BUILD_CONFIG, str(rank), ENGINE)


def _devices(gpus: Sequence[str]) -> str:
    """GPUs in the syntax of docker's --gpus, a CSV list, so several devices need quotes."""
    return f"device={gpus[0]}" if len(gpus) == 1 else f'"device={",".join(gpus)}"'
