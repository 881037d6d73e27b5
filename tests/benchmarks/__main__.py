"""`make bench`: every claim as a ratio, measured in this run on this machine. `python -m tests.benchmarks --help`."""

import argparse
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.assault.repositories import build as build_repository
from tests.benchmarks import calibration, conversion, planning, quality, serving
from tests.benchmarks.inflight import measure
from trtforge.core.assets import asset_directory
from trtforge.core.progress import for_this_terminal
from trtforge.core.recipe import load_recipe
from trtforge.pipeline.build import Build

RUNS = 3
RECIPES = ("demo-fp32", "demo-int4awq")


def main() -> None:
    """Measure what was asked for, all by default, and print tables."""
    benchmarks: dict[str, Callable[[Console, argparse.Namespace], None]] = {
        "planning": _planning,
        "conversion": _conversion,
        "calibration": _calibration,
        "quality": _quality,
        "inflight": _inflight_batching,
        "serving": _serving,
    }
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure the claims of the README.")
    parser.add_argument("which", nargs="*", help=f"of {', '.join(benchmarks)}; all if none is given")
    size = float(os.environ.get("TRTFORGE_BENCH_GB", "4"))
    parser.add_argument("--gb", type=float, default=size, help="size of the model to convert (TRTFORGE_BENCH_GB)")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each way to calibrate")
    parser.add_argument("--tokens", type=int, nargs="+", default=calibration.TOKENS, help="how much to calibrate on")
    parser.add_argument("--windows", type=int, nargs="+", default=calibration.WINDOWS, help="tokens of a sample")
    parser.add_argument(
        "--models", nargs="+", default=("demo", "large"), choices=("demo", "large"), help="to calibrate"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.which) - set(benchmarks)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    console = Console()
    console.print(f"machine: {_machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in arguments.which or benchmarks:
        benchmarks[name](console, arguments)


def _planning(console: Console, arguments: argparse.Namespace) -> None:
    table = Table(title=f"Planning Llama-3.1-405B (median of {RUNS} runs in turns)", title_justify="left")
    for column in ("command", "seconds", "peak memory"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for timed in planning.measure(RUNS):
        table.add_row(timed.command, f"{timed.seconds:.2f}", f"{timed.rss / 1e6:.0f} MB")
    console.print(table)


def _conversion(console: Console, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        result = conversion.measure(Path(directory), arguments.gb, RUNS)
    copy = result.measured[0]
    title = f"Conversion of {result.size / 1e9:.1f} GB of bfloat16 (median of {RUNS} interleaved runs)"
    table = Table(title=title, title_justify="left")
    for column in ("command", "written", "seconds", "times the copy", "peak memory"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for way in result.measured:
        ratio, written = f"{way.seconds / copy.seconds:.2f}", f"{way.written / 1e9:.1f} GB"
        table.add_row(way.name, written, f"{way.seconds:.1f}", ratio, f"{way.rss / 1e6:.0f} MB")
    console.print(table)
    console.print(
        f"Planning and checking Llama-3.1-405B, tp 8 pp 2, from its headers: {result.plan_405b.seconds:.2f} s"
    )


def _calibration(console: Console, arguments: argparse.Namespace) -> None:
    runs = f"median of {arguments.runs} interleaved runs" if arguments.runs > 1 else "one run"
    models = {
        "demo": (calibration.measure_demo, f"the demo model ({runs}"),
        "large": (calibration.measure_large, f"a 200 M Llama ({runs}; ModelOpt's AWQ once"),
    }
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        for name in arguments.models:
            measure, what = models[name]
            for window in arguments.windows:
                timed = measure(Path(directory), arguments.runs, arguments.tokens, window)
                console.print(_calibration_table(f"Calibration of {what}), windows of {window} tokens", timed))


def _calibration_table(title: str, timed: list[calibration.Timed]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("way", "windows a batch", "tokens", "seconds", "forward passes", "trtforge is", "peak memory"):
        table.add_column(column, justify="left" if column == "way" else "right")
    seconds = {(run.kind, run.tokens): run.seconds for run in timed}
    for run in timed:
        peer_of = run.kind.removeprefix("modelopt_").removesuffix("_bfloat16") if "modelopt" in run.kind else ""
        ours = seconds.get((peer_of, run.tokens))
        table.add_row(
            run.kind,
            str(run.batch),
            str(run.tokens),
            f"{run.seconds:.2f}" + (" (extrapolated)" if run.extrapolated else ""),
            f"{run.seconds / seconds['forward', run.tokens]:.2f}",
            "" if ours is None else f"{run.seconds / ours:.1f} times as fast",
            f"{run.rss / 1e6:.0f} MB",
        )
    return table


def _quality(console: Console, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        found = quality.measure(Path(directory))
    table = Table(title="Perplexity of the demo model's held-out text, against float32", title_justify="left")
    for column in ("format", "increase", "ModelOpt's", "top-1 agreement"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for each in found:
        peer = "-" if each.peer is None else f"{each.peer:+.2%}"
        table.add_row(each.format, f"{each.increase:+.2%}", peer, f"{each.top1:.2%}")
    console.print(table)


def _inflight_batching(console: Console, arguments: argparse.Namespace) -> None:
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


def _serving(console: Console, arguments: argparse.Namespace) -> None:
    for name in RECIPES:
        with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
            _served(console, name, serving.measure(build_repository(name, Path(directory)), RUNS))


def _served(console: Console, name: str, measured: serving.Measured) -> None:
    title = f"{serving.STREAMS} streams through Triton and the engine in process, {name} ({RUNS} interleaved runs)"
    table = Table(title=title, title_justify="left")
    for column in ("run", "tokens/s", "first token, ms", "CPU s for 1,000 tokens", "client", "cores used by others"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for number, pair in enumerate(zip(measured.served, measured.in_process, strict=True), start=1):
        for way, run in zip(("Triton", "in process"), pair, strict=True):
            share = f"{run.client_share:.0%}" if serving.CLIENT in run.cpu else ""
            figures = (
                f"{run.rate:.0f}",
                f"{run.first * 1000:.0f}",
                f"{run.cpu_seconds:.2f}",
                share,
                f"{run.others:.2f}",
            )
            table.add_row(f"{number}, {way}", *figures)
    console.print(table)
    console.print(
        f"medians: through Triton {measured.ratio:.0%} of the engine's tokens/s, "
        f"first token {measured.first_later * 1000:+.0f} ms"
    )
    cpu = measured.served[-1].cpu
    console.print("CPU seconds of the last run: " + ", ".join(f"{who} {seconds:.2f}" for who, seconds in cpu.items()))


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
