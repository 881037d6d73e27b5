"""`make bench`: every claim as a ratio, measured in this run on this machine. `python -m tests.benchmarks --help`.

What was measured replaces its figures in docs/benchmarks.json; the tables of docs/benchmarks.md and the README's
summary are generated from that file.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.assault.repositories import build as build_repository
from tests.benchmarks import (
    calibration,
    conversion,
    decode,
    domains,
    families,
    gateway,
    gpu,
    guidance,
    inflight,
    latency,
    planning,
    quality,
    recording,
    serving,
)
from tests.benchmarks.markdown import pages
from tests.benchmarks.record import (
    Record,
    read_record,
    with_attacks,
    with_calibration,
    with_domains,
    with_machine,
    write_record,
)
from trtforge.core.assets import asset_directory
from trtforge.core.progress import for_this_terminal
from trtforge.core.recipe import load_recipe
from trtforge.pipeline.build import Build

RUNS = 3
RECIPES = ("demo-fp32", "demo-int4awq")


def main() -> None:
    """Measure what was asked for, all by default; print tables, and record the figures."""
    benchmarks: dict[str, Callable[[Console, argparse.Namespace, Record], Record]] = {
        "planning": _planning,
        "conversion": _conversion,
        "calibration": _calibration,
        "quality": _quality,
        "domains": _domains,
        "inflight": _inflight_batching,
        "guidance": _guidance,
        "decode": _decode,
        "latency": _latency,
        "families": _families,
        "serving": _serving,
        "gateway": _gateway,
        "gpu": _gpu,
    }
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure the claims of the README.")
    parser.add_argument("which", nargs="*", help=f"of {', '.join(benchmarks)}; all but gpu if none is given")
    size = float(os.environ.get("TRTFORGE_BENCH_GB", "4"))
    parser.add_argument("--gb", type=float, default=size, help="size of the model to convert (TRTFORGE_BENCH_GB)")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each way to calibrate or decode, and of `latency`")
    parser.add_argument("--tokens", type=int, nargs="+", default=calibration.TOKENS, help="how much to calibrate on")
    parser.add_argument("--windows", type=int, nargs="+", default=calibration.WINDOWS, help="tokens of a sample")
    parser.add_argument(
        "--models", nargs="+", default=("demo", "large"), choices=("demo", "large"), help="to calibrate"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=domains.WAYS, default=domains.WAYS, help="what `domains` measures; others are kept"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of `gpu`; cpu with --tiny")
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=gpu.MODELS,
        default=tuple(gpu.MODELS),
        help="models of `gpu`; others are dropped",
    )
    parser.add_argument("--tiny", action="store_true", help="`gpu` with a model that shows only that it runs")
    parser.add_argument("--work", type=Path, help="where the second model of `domains` is kept, or already is")
    writing = parser.add_mutually_exclusive_group()
    writing.add_argument("--no-record", action="store_true", help="only print: write neither JSON nor Markdown")
    writing.add_argument("--markdown", action="store_true", help="measure nothing, write the tables of the JSON file")
    writing.add_argument(
        "--attacks", type=Path, nargs="+", help="measure nothing, record reports of `python -m tests.assault --json`"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.which) - set(benchmarks)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    if "gpu" in arguments.which and arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is available; --tiny --device cpu runs the same code")
    record = read_record()
    for path in arguments.attacks or ():
        record = record.model_copy(update={"attacks": with_attacks(record.attacks, recording.attacked(path))})
    if arguments.attacks:
        write_record(record)
    if arguments.markdown or arguments.attacks:
        _write_pages(record)
        return
    console = Console()
    console.print(f"machine: {recording.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    wanted = list(arguments.which or (name for name in benchmarks if name != "gpu"))
    if "quality" in wanted and "domains" not in wanted:  # two halves of one subject
        wanted.append("domains")
    for name in wanted:
        record = benchmarks[name](console, arguments, record)
        if not arguments.no_record:
            write_record(record)
            _write_pages(record)


def _write_pages(record: Record) -> None:
    for path, text in pages(record).items():
        path.write_text(text)


def _planning(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    table = Table(title=f"Planning Llama-3.1-405B (median of {RUNS} runs in turns)", title_justify="left")
    for column in ("command", "seconds", "peak memory"):
        table.add_column(column, justify="left" if column == "command" else "right")
    found = planning.measure(RUNS)
    for timed in found:
        table.add_row(timed.command, f"{timed.seconds:.2f}", f"{timed.rss / 1e6:.0f} MB")
    console.print(table)
    return record.model_copy(update={"planning": recording.planned(found, RUNS)})


def _conversion(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
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
    measured = with_machine(record.conversion, recording.converted(result, RUNS))
    return record.model_copy(update={"conversion": measured})


def _calibration(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
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
                model = recording.calibrated(timed, name, window, arguments.runs)
                record = record.model_copy(update={"calibration": with_calibration(record.calibration, model)})
    return record


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


def _quality(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        found = quality.measure(Path(directory))
        builds = quality.measure_builds(Path(directory))
    table = Table(title="Perplexity of the demo model's held-out text, against float32", title_justify="left")
    for column in ("format", "rounding", "increase", "ModelOpt's", "mean KL", "ModelOpt's KL", "top-1 agreement"):
        table.add_column(column, justify="left" if column in ("format", "rounding") else "right")
    for each in found:
        peer = ("-", "-") if each.peer is None else (f"{each.peer.increase:+.2%}", f"{each.peer.kl:.2e}")
        figures = (f"{each.increase:+.2%}", peer[0], f"{each.kl:.2e}", peer[1], f"{each.top1:.2%}")
        table.add_row(each.format, each.rounding or "", *figures)
    console.print(table)
    table = Table(title="Perplexity by the reports of the demo builds", title_justify="left")
    for column in ("recipe", "perplexity", "reference", "linears"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for built in builds:
        smaller = "-" if built.compression is None else f"{built.compression:.2f} times smaller"
        table.add_row(built.recipe, f"{built.perplexity:.3f}", f"{built.reference:.3f}", smaller)
    console.print(table)
    return record.model_copy(update={"quality": recording.judged(found, builds)})


def _domains(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as name:
        directory = arguments.work or Path(name)
        for case in domains.models(directory):
            found = domains.measure(case, directory, arguments.ways)
            table = Table(title=f"{case.name}, medians of {len(domains.SEEDS)} seeds", title_justify="left")
            for column in ("format", "group", "way", "KL, own domain", "KL, other", "perplexity", "other"):
                table.add_column(column)
            measured = recording.compared(case, found)
            for each in measured.ways:
                divergences = (f"{each.kl.median:.2e}", f"{each.kl_other.median:.2e}")
                increases = (f"{each.increase.median:+.2%}", f"{each.increase_other.median:+.2%}")
                table.add_row(each.format, str(each.group), each.way, *divergences, *increases)
            console.print(table)
            record = record.model_copy(update={"domains": with_domains(record.domains, measured)})
            if not arguments.no_record:
                write_record(record)
    return record


def _inflight_batching(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    found = {}
    for name in RECIPES:
        with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
            recipe = load_recipe(asset_directory("recipes") / f"{name}.yaml")
            build = Build(recipe, Path(directory), for_this_terminal())
            stages = (
                ("calibrate", "convert", "compile") if recipe.quantization.format != "none" else ("convert", "compile")
            )
            build.run(stages, started=lambda stage: None)
            found[name] = inflight.measure(build.paths.engine, vocab_size=2048, runs=RUNS)
        _show_inflight(console, name, found[name])
    peers = inflight.measure_transformers(asset_directory("recipes") / "demo-model", vocab_size=2048, runs=RUNS)
    for way, rates in peers.items():
        console.print(f"transformers, {way}: {statistics.median(rates):.0f} tokens/s")
    return record.model_copy(update={"inflight": recording.batched(found, peers, RUNS)})


def _guidance(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    """Printed only."""
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        recipe = load_recipe(asset_directory("recipes") / "demo-fp32.yaml")
        build = Build(recipe, Path(directory), for_this_terminal())
        build.run(("convert", "compile"), started=lambda stage: None)
        found = guidance.measure(build.paths.engine, vocab_size=2048, runs=2 * RUNS + 1)
    rates = ", ".join(f"{ours:.0f} of {theirs:.0f}" for ours, theirs in zip(found.guided, found.free, strict=True))
    console.print(f"Guided decoding, demo model: {found.cost:.1%} slower (median; tokens a CPU second {rates})")
    return record


def _show_inflight(console: Console, name: str, results: list[inflight.Measured]) -> None:
    best = results[0]
    table = Table(title=f"In-flight batching, {name} (median of {RUNS} interleaved runs)", title_justify="left")
    for column in ("batching", "steps", "tokens/s", "in-flight is"):
        table.add_column(column, justify="left" if column == "batching" else "right")
    for result in results:
        ratio = "" if result is best else f"{best.rate / result.rate:.2f} times as fast"
        table.add_row(result.batching, str(result.steps), f"{result.rate:.0f}", ratio)
    console.print(table)


def _decode(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        found, limits = decode.measure(Path(directory), arguments.runs)
    title = f"A random Llama of 200 M, tokens a second (median of {arguments.runs} runs in turns)"
    table = Table(title=title, title_justify="left")
    for column in ("way", *(f"{batch} in flight" for batch in decode.BATCHES), "prompts", "bandwidth", "limit"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for each in found:
        rates = (*(f"{rate:.1f}" for rate in each.decode.values()), f"{each.prefill:.0f}")
        table.add_row(each.way, *rates, *(f"{share:.0%}" for share in each.shares))
    console.print(table)
    measured = with_machine(record.decode, recording.decoded(found, limits, arguments.runs))
    return record.model_copy(update={"decode": measured})


def _families(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        found = families.measure(Path(directory), arguments.runs)
    title = f"Random networks in bfloat16, tokens a second and `transformers`' (median of {arguments.runs} runs)"
    table = Table(title=title, title_justify="left")
    for column in ("network", *(f"{batch} in flight" for batch in decode.BATCHES), "prompts"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for each in found:
        own, other = ((*way.decode.values(), way.prefill) for way in (each.ours, each.transformers))
        table.add_row(each.name, *(f"{fast:.1f}, {slow:.1f}" for fast, slow in zip(own, other, strict=True)))
    console.print(table)
    measured = with_machine(record.families, recording.of_families(found, arguments.runs))
    return record.model_copy(update={"families": measured})


def _gpu(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    models = gpu.TINY if arguments.tiny else {name: gpu.MODELS[name] for name in arguments.sizes}
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        found, limits = gpu.measure(Path(directory), models, gpu.FORMATS, arguments.device, arguments.runs)
    place, date = recording.place_of(arguments.device), datetime.now(timezone.utc).date().isoformat()
    measured = recording.on_gpu(found, models, limits, place, date, arguments.runs)
    table = Table(title=f"Random Llamas on {place.machine}, tokens a second", title_justify="left")
    for column in ("model", "format", "1 in flight", "bandwidth", "many", "transformers", "prompts", "products"):
        table.add_column(column, justify="left" if column in ("model", "format") else "right")
    for way in measured.ways:
        rates = (f"{way.alone:g}", f"{way.bandwidth:.0%}", f"{way.together:g}", f"{way.transformers:g}")
        table.add_row(way.model, way.format, *rates, f"{way.prompts}", f"{way.products:.0%}")
    console.print(table)
    return record if arguments.tiny else record.model_copy(update={"gpu": measured})


def _latency(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        found = latency.measure(Path(directory), arguments.runs)
    table = Table(title=f"Waiting times (median of {arguments.runs} runs)", title_justify="left")
    for column in ("what", "ms"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, seconds in asdict(found).items():
        table.add_row(name, f"{seconds * 1000:.1f}")
    console.print(table)
    console.print(
        f"known prefix {found.cold / found.warm:.1f} times as fast, worst gap {found.worst_gap / found.gap:.2f} times "
        f"the median ({found.worst_alone / found.gap:.2f} times without the long prompt), "
        f"long prompt beside others {found.long / found.long_alone:.2f} times as long as alone"
    )
    measured = with_machine(record.latency, recording.waited(found, arguments.runs))
    return record.model_copy(update={"latency": measured})


def _serving(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    found = {}
    for name in RECIPES:
        with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
            found[name] = serving.measure(build_repository(name, Path(directory)), serving.RUNS)
        _served(console, name, found[name])
    return record.model_copy(update={"serving": recording.served(found, serving.RUNS)})


def _served(console: Console, name: str, measured: serving.Measured) -> None:
    title = f"{serving.STREAMS} streams through Triton and the engine in process, {name}, {serving.RUNS} runs in turns"
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


def _gateway(console: Console, arguments: argparse.Namespace, record: Record) -> Record:
    measured = gateway.measure(RUNS)
    title = f"OpenAI's API before a server without a model (median of {RUNS} runs in turns)"
    table = Table(title=title, title_justify="left")
    for column in ("way", "p50 alone, ms", f"requests/s of {gateway.CONNECTIONS}"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, way in (("gateway", measured.gateway), ("bare FastAPI proxy", measured.proxy)):
        table.add_row(name, f"{way.p50 * 1000:.2f}", f"{way.rate:.0f}")
    console.print(table)
    console.print(f"overhead {measured.overhead * 1000:.2f} ms, {measured.events:.0f} streamed events/s")
    return record.model_copy(update={"gateway": recording.passed_on(measured, RUNS)})


if __name__ == "__main__":
    main()
