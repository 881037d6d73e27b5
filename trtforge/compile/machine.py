"""What this machine offers for a TensorRT-LLM build, found without importing or starting anything."""

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trtforge.core.packages import installed_release
from trtforge.core.recipe import EngineBackend


@dataclass(frozen=True)
class Machine:
    """`tensorrt_llm`: the installed release, None if not installed; `docker`: whether it is on PATH."""

    tensorrt_llm: str | None = None
    gpu: bool = False
    docker: bool = False

    @property
    def backend(self) -> EngineBackend:
        """The backend that `auto` resolves to."""
        return "tensorrt_llm" if self.tensorrt_llm is not None and self.gpu else "torch"


def this_machine(devices: Path = Path("/dev")) -> Machine:
    """This machine. A GPU is detected by the driver's device file; under WSL that is /dev/dxg."""
    return Machine(
        tensorrt_llm=installed_release("tensorrt_llm") if find_spec("tensorrt_llm") is not None else None,
        gpu=any((devices / name).exists() for name in ("nvidiactl", "dxg")),
        docker=shutil.which("docker") is not None,
    )
