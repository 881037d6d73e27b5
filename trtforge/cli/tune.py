"""`trtforge tune`: the serving settings and the load that are best for a goal, measured on this machine."""

import time
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.bench import levels_of
from trtforge.cli.options import MOST_INT32, MOST_SECONDS, Json, Quiet, Verbose, from_options
from trtforge.core.errors import ForgeError
from trtforge.core.figures import counted, duration
from trtforge.core.operands import operand

if TYPE_CHECKING:
    from trtforge.serve.speed import Load
    from trtforge.tune.goal import Goal, Point
    from trtforge.tune.result import Trial, Tuning
    from trtforge.tune.servers import Packaged

_GOAL, _WORKLOAD = "Goal", "Workload"


def tune(
    repository: Annotated[
        Path,
        typer.Argument(metavar="REPO", help="Model repository, or a build directory with one.", show_default=False),
    ],
    goal: Annotated[
        str,
        typer.Option(
            metavar="GOAL",
            rich_help_panel=_GOAL,
            help="throughput: most tokens per second; latency: shortest answers at the highest load.",
        ),
    ] = "throughput",
    ttft: Annotated[
        float | None,
        typer.Option(metavar="MS", rich_help_panel=_GOAL, help="Limit of the time to the first text."),
    ] = None,
    token_latency: Annotated[
        float | None,
        typer.Option(metavar="MS", rich_help_panel=_GOAL, help="Limit of the time of each further token."),
    ] = None,
    percentile: Annotated[
        float,
        typer.Option(metavar="P", rich_help_panel=_GOAL, help="Percentile of the requests whose times count."),
    ] = 95,
    concurrency: Annotated[
        str, typer.Option(metavar="N[,N...]", rich_help_panel=_WORKLOAD, help="Loads to try, in requests at once.")
    ] = "1,4,16,32",
    requests: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_WORKLOAD,
            help="Requests at each load; at least as many as run at once.",
        ),
    ] = 48,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_WORKLOAD, help="Length of each prompt.")
    ] = 128,
    max_tokens: Annotated[
        int, typer.Option(min=2, max=MOST_INT32, metavar="N", rich_help_panel=_WORKLOAD, help="Length of each answer.")
    ] = 64,
    seconds: Annotated[
        float, typer.Option("--time", min=1, max=MOST_SECONDS, metavar="SECONDS", help="Time for the whole run.")
    ] = 600,
    repeats: Annotated[
        int,
        typer.Option(min=3, metavar="N", help="Repetitions of the best settings and the present ones, in turn."),
    ] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be measured; start nothing.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find the best serving settings and load for a goal, by measuring.

    Serves variants of the repository one after another on free ports of this machine. They differ in settings that
    need no new engine, and are packaged into a temporary directory; the repository itself is not changed. A variant is
    recommended only if each of its repetitions was better than every repetition of the present settings. A build keeps
    the result in its tune.json.

    Example: trtforge tune build/demo-int4awq

    Example: trtforge tune build/demo-int4awq --ttft 200 --token-latency 5 --percentile 99 --concurrency 1,8,16,32

    Example: trtforge tune ./repository --goal latency --concurrency 8 --time 300 --dry-run
    """
    from trtforge.cli.places import artifact_at
    from trtforge.serve.speed import Load
    from trtforge.tune.goal import Goal
    from trtforge.tune.servers import Packaged

    limits = {"ttft": ttft, "token_latency": token_latency}
    wanted = from_options(Goal, {"objective": goal, **limits, "percentile": percentile}, "tune", _option)
    load = from_options(
        Load,
        {
            "concurrency": tuple(sorted(levels_of(concurrency))),
            "requests": requests,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
        },
        "tune",
    )
    packaged = Packaged.open(artifact_at(repository, "repository"))
    if dry_run:
        _plan(packaged, wanted, load, seconds, repeats, json=json)
        return
    packaged.require_runnable()
    tuning = _tuned(packaged, wanted, load, seconds, repeats, quiet=quiet or json)
    _show(tuning, packaged, _kept(repository, tuning), json=json)


def _option(key: str) -> str:
    return "--goal" if key == "objective" else f"--{key.replace('_', '-')}"


def _tuned(packaged: "Packaged", goal: "Goal", load: "Load", seconds: float, repeats: int, *, quiet: bool) -> "Tuning":
    from trtforge.core.progress import for_this_terminal
    from trtforge.pipeline.speed import busy_processors, this_machine
    from trtforge.tune.result import Tuning, now
    from trtforge.tune.servers import workplace
    from trtforge.tune.tuner import Budget, Tuner

    begun, busy = time.monotonic(), busy_processors()

    def say(line: str) -> None:
        if not quiet:
            show.message("measured", line)

    display = for_this_terminal(quiet=quiet)
    with workplace(packaged) as place:
        budget = Budget(begun + seconds, repeats)
        found = Tuner(place, packaged.limits(load), goal, load, budget, display, say).run()
    return Tuning(
        goal=goal,
        load=load,
        present=packaged.config.serving,
        trials=found.trials,
        recommended=found.recommended,
        highest_load=found.highest_load,
        seconds=round(time.monotonic() - begun, 1),
        repository=packaged.manifest.digest,
        machine=this_machine(),
        busy=busy,
        measured=now(),
    )


def _kept(place: Path, tuning: "Tuning") -> Path | None:
    """The file in the build; None for a repository that is not part of one, or if it is not writable."""
    from trtforge.cli.places import build_of
    from trtforge.pipeline.paths import Paths
    from trtforge.tune.result import keep

    build = build_of(place)
    if build is None:
        return None
    try:
        return keep(tuning, Paths(build).tuning)
    except ForgeError as error:  # the result is shown all the same
        show.warning(f"the result could not be saved: {error.message}")
        return None


def _plan(packaged: "Packaged", goal: "Goal", load: "Load", seconds: float, repeats: int, *, json: bool) -> None:
    from trtforge.tune.choice import MOST_FINALISTS
    from trtforge.tune.variants import PRESENT, variants

    names = [variant.name for variant in variants(packaged.config.serving, packaged.limits(load), load)]
    servers = 1 + len(names) + repeats * (1 + MOST_FINALISTS)
    if json:
        planned = {"goal": goal.model_dump(mode="json"), "load": load.model_dump(mode="json"), "variants": names}
        show.as_json({**planned, "repetitions": repeats, "servers": servers, "seconds": seconds})
        return
    levels = ", ".join(map(str, load.concurrency))
    show.line(f"goal: {goal.words}")
    show.line(f"loads: {levels} requests at once, {load.requests} requests each")
    show.line(f"requests: prompts of {load.prompt_tokens} tokens, answers of {load.max_tokens}")
    show.line(f"settings: {'; '.join((PRESENT, *names))}")
    show.line(f"repeated: the best {MOST_FINALISTS} of these and the present ones, {repeats} times in turn")
    show.line(f"time: at most {duration(seconds)}, for up to {counted(servers, 'start')} of a server")
    show.line("Variants that cannot make a difference, or are clearly worse at one load, end early.")


def _show(tuning: "Tuning", packaged: "Packaged", file: Path | None, *, json: bool) -> None:
    following = _following(tuning, packaged)
    if json:
        found = tuning.model_dump(mode="json")
        settings = tuning.settings.model_dump(mode="json", exclude_unset=True)
        show.as_json({**found, "settings": settings, "file": str(file) if file else None, "next": following})
        return
    head = ("settings", "at once", "tok/s", "first ms", "each ms", "")
    rows = [head, *(row for trial in tuning.trials if trial.points for row in _rows(trial, tuning))]
    print("\n".join(show.columns(rows, right=range(1, 5))))
    for line in (_legend(tuning), *_untried(tuning), *_conclusion(tuning)):
        show.line(line)
    busy = "" if tuning.busy is None else f"; other work used {tuning.busy:g} processors before"
    show.line(f"{tuning.machine}; {duration(tuning.seconds)}{busy}")
    if file is not None:
        show.line(f"kept in {show.path(file)}")
    print(f"next: {following}")


def _rows(trial: "Trial", tuning: "Tuning") -> list[tuple[str, ...]]:
    """All loads of the recommended settings and of the present ones, the best one of the others."""
    shown = dict.fromkeys(point.concurrency for point in trial.points)
    if trial.variant.changes and trial.variant != tuning.recommended:
        shown = dict.fromkeys([(tuning.goal.best(trial.points) or trial.points[-1]).concurrency])
    rows = []
    for number, load in enumerate(sorted(shown)):
        point = _typical(trial, load, tuning)
        result = _result(trial) if number == 0 else ""
        told = result or ("" if tuning.goal.keeps(point) else "over a limit")
        rows.append((trial.variant.name if number == 0 else "", *_figures(point), told))
    return rows


def _typical(trial: "Trial", load: int, tuning: "Tuning") -> "Point":
    """The median one of the repetitions at a load, as gains are of medians; without any the last measurement."""
    compared = [found for each in tuning.trials if (found := each.comparison) is not None]
    counts = [len(found.present) for found in compared]
    if trial.variant.changes:
        counts = [len(trial.comparison.variant)] if trial.comparison is not None else []
    measured = [point for point in trial.points if point.concurrency == load]
    repeated = measured[-max([*counts, 1]) :]
    # Points that break a limit all have the score 0.
    repeated.sort(key=lambda point: (tuning.goal.score(point), point.tokens_per_second))
    return repeated[(len(repeated) - 1) // 2]


def _figures(point: "Point") -> tuple[str, ...]:
    return (
        str(point.concurrency),
        f"{point.tokens_per_second:,.0f}",
        f"{point.first_text_ms:,.0f}",
        f"{point.next_token_ms:,.1f}",
    )


def _result(trial: "Trial") -> str:
    found = trial.comparison
    if trial.failed:
        return "server failed"
    if found is None:
        return trial.untried or ("not better" if trial.variant.changes else "")
    if broken := found.variant.count(0):
        return f"over a limit in {broken} of {len(found.variant)}"
    said = {"no difference": "noise", "too few repetitions": "too few"}.get(found.verdict, found.verdict)
    return said if found.gain is None else f"{said}, {round(found.gain, 2) + 0.0:+.0%}"


def _legend(tuning: "Tuning") -> str:
    counts = {len(found.variant) for trial in tuning.trials if (found := trial.comparison) is not None}
    times = f"first ms, each ms: to the first text, for each further token, at p{tuning.goal.percentile:g}"
    return f"{times}; gains in {max(counts)} repetitions" if counts else times


def _untried(tuning: "Tuning") -> list[str]:
    """The variants that were not measured, by the reason."""
    reasons: dict[str, list[str]] = {}
    for trial in tuning.trials:
        if not trial.points:
            reasons.setdefault(trial.untried, []).append(trial.variant.name)
    return [f"not measured: {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _conclusion(tuning: "Tuning") -> list[str]:
    from trtforge.tune.result import NO_TIME, recipe_lines
    from trtforge.tune.variants import PRESENT

    lines = []
    if tuning.recommended.changes:
        lines.append(f"recommended: {tuning.recommended.name}; in a recipe:")
        lines += [f"  {line}" for line in recipe_lines(tuning.recommended)]
    else:
        measured = any(trial.points for trial in tuning.trials if trial.variant.changes)
        why = "better beyond the noise" if measured else "measured"
        lines.append(f"recommended: the present settings; no variant was {why}")
    cut = any(
        trial.comparison and trial.comparison.verdict == "too few repetitions"
        for trial in tuning.trials
        if not trial.failed
    )
    failed = {trial.variant.name: trial.failed for trial in tuning.trials if trial.failed}
    for name, error in failed.items():
        lines.append(f"the repetitions ended early, since a server failed: {name}: {error}")
    if (cut and PRESENT not in failed) or NO_TIME in [trial.untried for trial in tuning.trials]:
        lines.append("the time ended before all was measured: give more --time, fewer --requests or shorter answers")
    if not tuning.goal.limited:
        return lines
    found = tuning.highest_load
    if found is None:
        lines.append(f"no measured load keeps the limits ({tuning.goal.words}): try fewer requests at once")
    else:
        lines.append(f"highest load within the limits: {tuning.goal.said(found)}")
    return lines


def _following(tuning: "Tuning", packaged: "Packaged") -> str:
    """The command that packages the recommended settings; that serves the repository if they are the present ones."""
    from trtforge.tune.result import package_options, set_options

    place = packaged.repository
    if not tuning.recommended.changes:
        return join(["trtforge", "serve", operand(show.path(place))])
    engine, out = place.parent / "engine", place
    if not packaged.is_of(engine):
        engine, out = packaged.engine, place.with_name(f"{place.name}-tuned")
    tokenizer = [] if engine != packaged.engine else ["--tokenizer", show.path(packaged.tokenizer)]
    words = [
        "trtforge",
        "package",
        operand(show.path(engine)),
        operand(show.path(out)),
        *tokenizer,
        *package_options(packaged.config),
    ]
    return join([*words, *set_options(tuning.settings)])
