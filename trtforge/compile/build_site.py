"""Where the ranks of an engine are built: in processes here, or each in a container of an image with TensorRT-LLM.

Either way a rank is one run of inside/rank.py, not of `trtllm-build`: that builds all ranks in one run, and so gives no
log of a rank, goes on for hours when one rank has failed, and begins with all of them again.
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

BUILD_CONFIG = "build_config.json"
ENGINE = "engine"
"""In a rank's working directory: what it reads, and the directory that it writes."""

_PROGRAM = Path(__file__).parent / "inside" / "rank.py"
_PROGRAM_INSIDE = "/opt/trtforge/rank.py"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Run:
    """A process: its command, what it adds to the environment, and a command that ends what outlives it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cleanup: tuple[str, ...] = ()


class BuildSite(Protocol):
    """Makes the runs that build an engine. `gpus`: those to use, as CUDA_VISIBLE_DEVICES has them; None for all."""

    @property
    def name(self) -> str:
        """The place in words."""

    def target(self, gpus: Sequence[str] | None) -> Run:
        """Prints what engines would be built with there (see `target` in inside/rank.py)."""

    def rank(self, rank: int, gpu: str, checkpoint: Path, directory: Path) -> Run:
        """Builds a rank of `checkpoint`, to be started in `directory`, which holds BUILD_CONFIG."""


@dataclass(frozen=True)
class LocalSite:
    """Processes of this machine's own Python, which has TensorRT-LLM."""

    name: str = "this machine"

    def target(self, gpus: Sequence[str] | None) -> Run:
        """See BuildSite; the environment says the GPUs already."""
        return Run((sys.executable, str(_PROGRAM), "target"))

    def rank(self, rank: int, gpu: str, checkpoint: Path, directory: Path) -> Run:
        """See BuildSite."""
        return Run((sys.executable, str(_PROGRAM), *_build(rank, checkpoint)), {_VISIBLE: gpu})


@dataclass(frozen=True)
class ContainerSite:
    """Containers of `image`, named after the engine `out`.

    Each gets a name of its own: one that a killed client left must neither stop the next run nor be taken for its own.
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
        """See BuildSite. Both directories keep their paths inside."""
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
    """`docker run` up to the options of one container, whose files belong to who runs it.

    Shared memory and locked memory as NVIDIA's container notes ask for NCCL; `--init` passes on the signals that end
    a build; a user whom the image does not know needs a name and a place for caches (`getpass.getuser` in torch).
    """
    return (
        *("docker", "run", "--rm", "--init", "--gpus", gpus),
        *("--user", f"{os.getuid()}:{os.getgid()}", "--env", "USER=trtforge", "--env", "HOME=/tmp"),
        *("--shm-size", "1g", "--ulimit", "memlock=-1"),
    )


def mount(path: Path, *, inside: str | None = None, read_only: bool = False) -> str:
    """The value of --mount that shows `path` inside, where it is outside unless told. Raises ForgeError for a comma."""
    if "," in str(path):
        raise ForgeError(f"{path}: docker cannot mount a path with a comma", hint="Use a path without one.")
    source = path.absolute()
    return f"type=bind,source={source},target={inside or source}" + (",readonly" if read_only else "")


def chosen_gpus(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES allows; None where it is not set."""
    value = environment.get(_VISIBLE)
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def lanes(ranks: Sequence[int], gpus: Sequence[str], workers: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """A GPU and the ranks that are built on it, one after the other, for each of at most `workers` workers.

    `trtllm-build --workers` deals them out in the same way.
    """
    count = min(workers, len(gpus), len(ranks))
    return tuple((gpus[lane], tuple(ranks[lane::count])) for lane in range(count))


def _build(rank: int, checkpoint: Path) -> tuple[str, ...]:
    return ("build", str(checkpoint.absolute()), BUILD_CONFIG, str(rank), ENGINE)


def _devices(gpus: Sequence[str]) -> str:
    """GPUs as docker's --gpus has them: a list of fields, so several devices need quotes around them."""
    return f"device={gpus[0]}" if len(gpus) == 1 else f'"device={",".join(gpus)}"'
