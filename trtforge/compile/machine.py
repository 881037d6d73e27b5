"""What this machine has that a TensorRT-LLM build needs: looked at only, nothing is imported or started."""

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from trtforge.core.packages import installed_release


@dataclass(frozen=True)
class Machine:
    """`tensorrt_llm` is the installed release, None where there is none; `docker`: whether it is on PATH."""

    tensorrt_llm: str | None = None
    gpu: bool = False
    docker: bool = False

    @property
    def backend(self) -> Literal["tensorrt_llm", "torch"]:
        """What the backend `auto` is here."""
        return "tensorrt_llm" if self.tensorrt_llm is not None and self.gpu else "torch"


def this_machine(devices: Path = Path("/dev")) -> Machine:
    """The machine we run on. A GPU shows as the driver's device file; /dev/dxg is one under WSL."""
    return Machine(
        tensorrt_llm=installed_release("tensorrt_llm") if find_spec("tensorrt_llm") is not None else None,
        gpu=any((devices / name).exists() for name in ("nvidiactl", "dxg")),
        docker=shutil.which("docker") is not None,
    )
