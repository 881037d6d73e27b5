"""`trtforge advise`: what limits a running server, and what to change, from its metrics."""

from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import MOST_SECONDS, Json, Quiet, Verbose
from trtforge.core.defaults import METRICS_URL
from trtforge.core.figures import counted

if TYPE_CHECKING:
    from trtforge.advise.advice import Advice, Missing
    from trtforge.advise.readings import EngineObserved, Observation


def advise(
    url: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="Address of the server or of its metrics; optionally also that of `trtforge gateway`.",
            show_default=METRICS_URL,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=MOST_SECONDS, metavar="SECONDS", help="Time to observe the server.")
    ] = 10,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say what limits a running server, and what to change.

    Reads the server's metrics for a while, under its current load, and its model configuration if that is open
    (`trtforge serve --open model-config`). Each piece of advice comes with its figures; if the metrics lack a figure
    that is needed, the output says so. Nothing is sent to the models.

    Example: trtforge advise

    Example: trtforge advise 127.0.0.1:8002 127.0.0.1:8003 --seconds 60

    Example: trtforge advise http://triton:8002/metrics --json
    """
    from trtforge.advise.rules import judged
    from trtforge.advise.sources import Sources, observe
    from trtforge.core.progress import for_this_terminal

    sources = Sources.at(url or [METRICS_URL])
    with for_this_terminal(quiet=quiet or json).bar("observing", seconds, "seconds") as bar:
        seen, ended = observe(sources, seconds, bar.advance)
    advice, missing = judged(seen)
    if json:
        show.as_json(
            {
                "metrics": list(sources.metrics),
                "seconds": round(seen.seconds, 1),
                "readings": len(seen.readings),
                "ended": ended or None,
                "engines": {engine.name: _figures(engine) for engine in seen.engines},
                "advice": [each.model_dump(mode="json") for each in advice],
                "missing": [each.model_dump(mode="json") for each in missing],
            }
        )
        return
    if ended:
        show.warning(f"{ended}; the results cover the {seen.seconds:.1f} s before that")
    _show(seen, sources.metrics, advice, missing)


def _show(seen: "Observation", where: "tuple[str, ...]", advice: "list[Advice]", missing: "list[Missing]") -> None:
    show.line(f"{' and '.join(where)}: {counted(len(seen.readings), 'reading')} in {seen.seconds:.1f} s")
    for engine in seen.engines:
        told = ", ".join(f"{name} {value}" for name, value in _words(engine))
        show.line(f"{engine.name}: {told}")
    if not advice:
        show.line("no limit was found in these figures")
    for number, each in enumerate(advice, start=1):
        show.line(f"{number}. {each.limit} ({each.confidence})")
        rows = [("seen", each.evidence), ("change", each.change), ("setting", each.setting), ("effect", each.effect)]
        for name, text in rows:
            if text:
                show.line(f"   {name}: {text}")
    for lack in missing:
        show.line(f"not judged: {lack.lacks}")


def _figures(engine: "EngineObserved") -> dict[str, float | None]:
    """Means over the observation."""
    return {
        "scheduled": engine.mean(lambda each: each.requests_scheduled),
        "max": engine.seen[-1].requests_max,
        "waiting": engine.mean(lambda each: each.waiting),
        "kv_share": engine.mean(lambda each: each.blocks_share),
        "iterations": engine.growth(lambda each: each.iteration_counter),
    }


def _words(engine: "EngineObserved") -> "list[tuple[str, str]]":
    found = _figures(engine)
    words = [(name, found[name], f"{found[name] or 0:.1f}") for name in ("scheduled", "waiting")]
    words[0] = ("running", found["scheduled"], f"{found['scheduled'] or 0:.1f} of {found['max'] or 0:.0f}")
    words += [("KV blocks", found["kv_share"], f"{found['kv_share'] or 0:.0%}")]
    return [(name, text) for name, value, text in words if value is not None]
