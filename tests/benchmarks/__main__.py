"""`make bench`: every claim as a ratio, measured in this run on this machine."""

import platform
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.inflight import measure
from trtforge.core.assets import asset_directory
from trtforge.core.progress import for_this_terminal
from trtforge.core.recipe import load_recipe
from trtforge.pipeline import Build

RUNS = 3
RECIPES = ("demo-fp32", "demo-int4awq")


def main() -> None:
    """Build the engines, measure, print tables."""
    console = Console()
    console.print(f"machine: {_machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in RECIPES:
        with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
            recipe = load_recipe(asset_directory("recipes") / f"{name}.yaml")
            build = Build(recipe, Path(directory), for_this_terminal())
            stages = (
                ("calibrate", "convert", "compile") if recipe.quantization.format != "none" else ("convert", "compile")
            )
            build.run(stages, started=lambda stage: None)
            _inflight(console, name, build.paths.engine)


def _inflight(console: Console, name: str, engine: Path) -> None:
    results = measure(engine, vocab_size=2048, runs=RUNS)
    best = results[0]
    table = Table(title=f"In-flight batching, {name} (median of {RUNS} interleaved runs)", title_justify="left")
    for column in ("batching", "steps", "tokens/s", "in-flight is"):
        table.add_column(column, justify="left" if column == "batching" else "right")
    for result in results:
        ratio = "" if result is best else f"{best.rate / result.rate:.2f} times as fast"
        table.add_row(result.batching, str(result.steps), f"{result.rate:.0f}", ratio)
    console.print(table)


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
