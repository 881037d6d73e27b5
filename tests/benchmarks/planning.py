"""How long planning Llama-3.1-405B takes, whole commands with the interpreter's start, from the facts that ship."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RECIPE = "llama-3.1-405b-fp8"
COMMANDS = (
    ("plan", RECIPE),
    ("plan", RECIPE, "--set", "parallel.tp=3"),
    ("plan", RECIPE, "--alternatives"),
    ("build", RECIPE, "--dry-run"),
)
"""A legal plan, one that searches for a fix, every other choice ranked, and every stage's plan."""


@dataclass(frozen=True)
class Timed:
    """One command: the median of its runs, and the most memory of any."""

    command: str
    seconds: float
    rss: int


def measure(runs: int) -> tuple[Timed, ...]:
    """Every command `runs` times, in turns."""
    taken: dict[tuple[str, ...], list[tuple[float, int]]] = {command: [] for command in COMMANDS}
    for _ in range(runs):
        for command, found in taken.items():
            found.append(_run(command))
    return tuple(
        Timed(" ".join(("trtforge", *command)), median(s for s, _ in found), max(rss for _, rss in found))
        for command, found in taken.items()
    )


def _run(words: Sequence[str]) -> tuple[float, int]:
    launcher = (sys.executable, "-m", "tests.benchmarks.launch", sys.executable, "-m", "trtforge", *words)
    done = subprocess.run(launcher, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["seconds"]), int(found["rss"])
