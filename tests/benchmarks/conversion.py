"""Conversion against a plain copy of the source, and against loading the model with transformers and saving the ranks.

Every run is a fresh process that begins with the source in the page cache and nothing left to write, and ends when its
output is on the disk. Variants take turns; the medians are reported. Each measured run follows one of the same that is
not: on a virtual machine memory that was never used costs more than the copy, and the outputs differ in size.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.synthetic import LLAMA_405B, llama_of, write_model

Command = tuple[str, ...]
Run = tuple[float, int, int]
"""Seconds, peak bytes, bytes written."""
COPY = "cp -r"
PLAN_405B = (
    "import sys; from pathlib import Path; from trtforge.convert.stage import ConvertConfig, plan_conversion; "
    "assert len(plan_conversion(ConvertConfig(tp=8, pp=2), Path(sys.argv[1])).plan.targets) > 800"
)


@dataclass(frozen=True)
class Measured:
    """One way to do it: seconds of each run. `rss` is the peak in bytes, mapped files included; `written` in bytes."""

    name: str
    runs: tuple[float, ...]
    rss: int
    written: int

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(self.runs)


@dataclass(frozen=True)
class Conversion:
    """The results, the copy first; `size` of the source in bytes, `plan_405b`: plan and check a layout of 405B."""

    size: int
    measured: list[Measured]
    plan_405b: Measured


def measure(directory: Path, gigabytes: float, runs: int) -> Conversion:
    """Write the model below `directory` and convert it every way, `runs` times."""
    source, out = directory / "source", directory / "out"
    size = write_model(source, llama_of(gigabytes))
    python, here, there = sys.executable, str(source), str(out)
    commands: dict[str, Command] = {
        COPY: ("cp", "-r", here, there),
        **{f"trtforge, tp {tp}": (python, "-m", "trtforge", "convert", here, there, "--tp", str(tp)) for tp in (1, 8)},
        **{f"transformers, tp {tp}": (python, "-m", "tests.benchmarks.peer", here, there, str(tp)) for tp in (1, 8)},
    }
    found: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            _launch(command, out)
            found[name].append(_launch(command, out))
    shutil.rmtree(out)
    write_model(directory / "405b", LLAMA_405B, values=False)
    plan = (python, "-c", PLAN_405B, str(directory / "405b"))
    plans = [_launch(plan, out) for _ in range(runs)]
    return Conversion(size, [_measured(name, results) for name, results in found.items()], _measured("plan", plans))


def _measured(name: str, runs: list[Run]) -> Measured:
    seconds, rss, written = zip(*runs, strict=True)
    return Measured(name, seconds, max(rss), max(written))


def _launch(command: Command, out: Path) -> Run:
    """Run `command`, which may write `out`, in a fresh process."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    launcher = (sys.executable, "-m", "tests.benchmarks.launch", *command)
    done = subprocess.run(launcher, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    result = json.loads(done.stdout)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return result["seconds"], result["rss"], written
