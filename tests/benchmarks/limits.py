"""What this machine can do at best: it reads memory and multiplies in registers, by a program that is compiled here."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from trtforge.machine.compiler import find_compiler
from trtforge.machine.host import Host

_SOURCE = Path(__file__).with_name("limits.cpp")
_READ = 1 << 29  # bytes, more than any cache
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp")


@dataclass(frozen=True)
class Limits:
    """A second's bytes from memory, and multiply-adds of bfloat16 and of int8.

    The former by bfloat16's own or float32's instruction, the latter by int8's own or 16-bit integers'.
    """

    bandwidth: float
    bfloat16: float
    int8: float


class Probe:
    """The program, compiled below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._program = directory / "limits"
        compiler = find_compiler(Host())
        assert compiler is not None, "the benchmark needs a C++ compiler"
        subprocess.run([*compiler, *_FLAGS, str(_SOURCE), "-o", str(self._program)], check=True)

    def measure(self, threads: int) -> Limits:
        """The limits of so many threads."""
        done = subprocess.run(
            [str(self._program), str(_READ), str(threads)], check=True, capture_output=True, text=True
        )
        return Limits(**json.loads(done.stdout))
