"""What a user sees of a build: a header at once, bars or dated lines while it runs, a table at its end.

Header, bars and lines go to stderr, the table to stdout.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.cli import show
from trtforge.core import figures

if TYPE_CHECKING:
    from types import TracebackType

    from trtforge.core.progress import Silent, Terminal
    from trtforge.core.recipe import Recipe
    from trtforge.pipeline.record import Record
    from trtforge.pipeline.report import StageReport

_SCREEN_LINES = 24
_HEADER_LINES = 5
_LABEL = 12  # columns of a label before its text


class BuildView:
    """The header, and the progress of the stages. Leaving it closes the bars.

    On a terminal a stage shows a bar, or the time that passes until it has one. In a log it writes one dated line when
    it starts and one when it ends.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._running: str | None = None
        self._bars = ExitStack()
        self._progress: Terminal | Silent | None = None

    @property
    def progress(self) -> "Terminal | Silent":
        """Where the stages open their bars."""
        if self._progress is None:
            from trtforge.core.progress import for_this_terminal

            self._progress = for_this_terminal(quiet=self._quiet)
        return self._progress

    def header(self, recipe: "Recipe", out: Path, text: str | None = None) -> None:
        """Print what will be built, and `text`, a derived recipe. Reads the recipe and config.json only.

        On a terminal the time passes until the first stage starts.
        """
        if self._quiet:
            return
        print("\n".join(header_lines(recipe, out, show.width(sys.stderr))), file=sys.stderr)
        if text is not None:
            print(f"\n{text}", file=sys.stderr)
        sys.stderr.flush()
        if self._terminal:
            self._bars.enter_context(self.progress.waiting("checking"))

    def say(self, text: str) -> None:
        """Print a line beside the progress."""
        if not self._quiet:
            print(text if self._terminal else f"{_now()} {text}", file=sys.stderr, flush=True)

    def started(self, stage: str) -> None:
        """A stage begins."""
        self._bars.close()
        self._running = stage
        if not self._terminal:
            self.say(f"{stage}: started")
        self._bars.enter_context(self.progress.waiting(stage))

    def finished(self, stage: "StageReport") -> None:
        """A stage is done."""
        self._bars.close()
        self._running = None
        done = stage.origin if stage.cached else f"done in {figures.duration(stage.seconds)}"
        place = "" if stage.artifact is None else f", {figures.size(stage.bytes)} in {show.path(stage.artifact)}"
        self.say(f"{stage.stage}: {done}" + ("" if stage.cached or self._terminal else place))

    def failed(self, *, interrupted: bool = False) -> None:
        """The stage that runs is not completed."""
        self._bars.close()
        if self._running is not None and not self._terminal:
            self.say(f"{self._running}: {'interrupted' if interrupted else 'failed'}")
        self._running = None

    def __enter__(self) -> "BuildView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.failed(interrupted=isinstance(error, KeyboardInterrupt | SystemExit))


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def header_lines(recipe: "Recipe", out: Path, width: int) -> list[str]:
    """Model, parameters, formats, layout, hardware and output directory."""
    from trtforge.pipeline.report_words import formats, layout
    from trtforge.pipeline.summary import deployment_of, light_model, model_record

    model = light_model(recipe)
    deployment = deployment_of(recipe, model)
    about = ""
    if model is not None:
        record = model_record(model)
        about = f", {record.family}, {figures.parameters(record.parameters)} parameters"
        about += f", {figures.size(record.source_bytes)}"
    room = max(width - _LABEL, 20)
    rows = {
        "model": show.path(recipe.model.source, max(room - len(about), 16)) + about,
        "formats": formats(deployment),
        "layout": f"{layout(deployment)} on {deployment.hardware}",
        "output": show.path(out, room),
    }
    return [f"Build {recipe.name}", *(f"  {label:<{_LABEL - 2}}{text}" for label, text in rows.items())]


def show_report(report: "Record") -> None:
    """Print the table of stages, sizes and quality with the gate's limits, and the next command."""
    width = show.width(sys.stdout)
    stages = [*_stage_lines(report, width), ""] if report.stages else []
    print("\n".join([f"Build {report.recipe}", *stages, *_result_lines(report, width)]))
    print(f"next: {report.next}")


def _stage_lines(report: "Record", width: int) -> list[str]:
    """A line a stage. One that was not run has no figures: its result says why."""
    from trtforge.pipeline.report_words import outcome

    rows = [["stage", "result", "time", "memory", "size"]]
    places = ["artifact"]
    if report.stages and report.stages[0].stage == "convert" and _needs_no_calibration(report):
        rows.append(["calibrate", "not needed", *3 * [figures.ABSENT]])
        places.append("")
    for stage in report.stages:
        memory = figures.size(stage.peak_memory) if stage.peak_memory else figures.ABSENT
        made = figures.size(stage.bytes) if stage.artifact else figures.ABSENT
        measured = [figures.duration(stage.seconds), memory, made]
        rows.append(
            [stage.stage, outcome(stage, report.verification), *(3 * [figures.ABSENT] if stage.cached else measured)]
        )
        places.append(stage.artifact or "")
    lines = show.columns(rows, right=(2, 3, 4))
    left = max(map(len, lines)) + 2
    return [f"{line:<{left}}{show.path(place, width - left) if place else ''}".rstrip() for line, place in
            zip(lines, places, strict=True)]  # fmt: skip


def _needs_no_calibration(report: "Record") -> bool:
    from trtforge.models.formats import FORMATS

    deployment = report.deployment
    return (
        deployment is not None
        and deployment.kv_cache == "none"
        and any(name == deployment.quant and not found.calibrated for name, found in FORMATS.items())
    )


def _result_lines(report: "Record", width: int) -> Iterator[str]:
    room = width - _LABEL
    if report.model is not None and report.engine_bytes:
        linears = ""
        if report.compression is not None and report.compression > 1:
            linears = f", quantised layers {report.compression:.2f} times"
        sizes = f"{figures.size(report.model.source_bytes)} -> {figures.size(report.engine_bytes)}"
        text = f"{sizes}, {figures.ratio(report.smaller)}{linears}"
        yield f"{'size':<{_LABEL}}{text}"
    elif report.compression is not None and report.compression > 1:
        yield f"{'size':<{_LABEL}}quantised layers {report.compression:.2f} times smaller"
    if report.verification is not None:
        yield from _quality_lines(report, room)
    if report.out is not None and report.stages:  # a build that ran no stage leaves the report of an earlier one
        yield f"{'report':<{_LABEL}}{show.path(Path(report.out) / 'report.html', room)}"


def _quality_lines(report: "Record", room: int) -> Iterator[str]:
    """Each metric beside its limit, the verdict, and the data."""
    from trtforge.core.figures import ABSENT
    from trtforge.pipeline.report_words import data_used, metrics, verdict

    quality, gate = report.verification, report.gate
    assert quality is not None
    names = {"top-1 agreement": "top-1", "mean KL divergence": "KL mean", "99th percentile of KL": "KL p99"}
    found = [(names.get(metric.name, metric.name), metric) for metric in metrics(quality, gate)]
    rows = [
        [f"{name:<{_LABEL - 2}}", metric.value, "" if metric.passed is None else metric.limit, metric.verdict]
        for name, metric in found
    ]
    yield from show.columns(rows)
    intervals = [f"{name} {metric.interval}" for name, metric in found if metric.interval != ABSENT]
    if intervals:
        yield f"{'95 %':<{_LABEL}}{intervals[0]}"
        yield from (f"{'':<{_LABEL}}{interval}" for interval in intervals[1:])
    if gate is not None:
        used = f", {data_used(gate, quality.tokens)}"
        yield f"{'data':<{_LABEL}}{show.path(gate.data, max(room - len(used), 16))}{used}"
    earlier = ", measured by an earlier run" if report.measured_earlier else ""
    yield f"{'gate':<{_LABEL}}{verdict(quality)}{earlier}"


def print_header(recipe: "Recipe", out: Path) -> None:
    """Print the header above the plan of a build; the plan itself follows after seconds of imports."""
    print("\n".join(header_lines(recipe, out, show.width(sys.stdout))), flush=True)


def show_dry_run(plan: Mapping[str, Any], command: str) -> None:
    """Print the plan of a build below its header, both on one screen.

    `plan`: what --json prints; `command`: the build without --dry-run.
    """
    width = show.width(sys.stdout)
    lines = [*_deployment_lines(plan["deployment"]), ""]
    lines += [f"  {stage:<{_LABEL - 2}}{_planned(stage, found)}" for stage, found in plan["stages"].items()]
    closing = ["", "nothing was written; every detail: --json", f"next: {command}"]
    of_engine = plan["stages"].get("compile", {}).get("warnings", ())
    stated = list(dict.fromkeys([*plan["deployment"]["warnings"], *plan["deployment"]["notes"], *of_engine]))
    warnings = [line for text in stated for line in show.wrapped(f"warning: {text}", width, "  ").splitlines()]
    used = sum(1 + line.count("\n") for line in (*lines, *closing))
    if used + len(warnings) > _SCREEN_LINES - _HEADER_LINES:
        warnings = [f"{len(stated)} warnings: see --json"]
    print("\n".join([*lines, *warnings, *closing]))


def _deployment_lines(deployment: Mapping[str, Any]) -> Iterator[str]:
    if deployment["memory_per_gpu"] is not None:
        where = "a GPU" if deployment["gpu"] else "a rank"
        weights = figures.size(deployment["weights_per_gpu"])
        yield f"  {'memory':<{_LABEL - 2}}{figures.size(deployment['memory_per_gpu'])} on {where}, weights {weights}"
    if deployment["kv_tokens"]:
        requests, prompt = deployment["full_length_requests"], deployment["longest_prompt"]
        text = f"KV cache of {deployment['kv_tokens']:,} tokens: {requests:,} full-length requests"
        yield f"  {'capacity':<{_LABEL - 2}}{text}"
        yield f"  {'prompts':<{_LABEL - 2}}at most {prompt:,} tokens"


def _planned(stage: str, plan: Mapping[str, Any]) -> str:
    """A line that says what a stage will do."""
    match stage:
        case "calibrate":
            data = plan["calibration"]
            return f"{data['samples']} samples of {data['sequence_length']} tokens, {show.path(data['data'], 36)}"
        case "convert":
            ranks = plan["ranks"]
            return f"{figures.counted(len(ranks), 'rank')}, {figures.size(sum(rank['bytes'] for rank in ranks))}"
        case "verify":
            gate = plan["gate"]
            said: dict[str, Callable[[float], str]] = {
                "perplexity_increase": lambda most: f"perplexity at most {figures.change(most)}",
                "top1_agreement": lambda least: f"top-1 at least {figures.share(least)}",
                "kl_mean": lambda most: f"KL mean at most {figures.nats(most)} nats",
                "kl_p99": lambda most: f"KL p99 at most {figures.nats(most)} nats",
            }
            limits = [words(gate[key]) for key, words in said.items() if gate[key] is not None]
            samples = f"{gate['samples']} samples of {gate['sequence_length']} tokens, {show.path(gate['data'], 36)}"
            return f"{', '.join(limits) or 'no limits'}\n{'':<{_LABEL}}{samples}"
        case "compile":
            return _planned_engine(plan)
        case _:
            return f"{figures.counted(len(plan['models']), 'Triton model')}, {plan['serving']['scheduler']}"


def _planned_engine(plan: Mapping[str, Any]) -> str:
    limits = plan.get("build_config", {})
    size = ", ".join(f"{key} {limits[key]:,}" for key in ("max_batch_size", "max_seq_len") if limits.get(key))
    if plan["backend"] == "llmapi":
        return f"LLM API {plan['tensorrt_llm']}, {figures.counted(plan['processes'], 'process', 'processes')}"
    ranks = figures.counted(len(plan["ranks"]), "rank")
    if plan["backend"] == "torch":
        return f"embedded engine, {ranks}; {size}"
    return f"TensorRT-LLM {plan['tensorrt_llm']}, {ranks}; {size}\n{'':<{_LABEL}}{plan['place']}"
