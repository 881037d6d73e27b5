"""`trtforge build --quant F,F…`: one build in each format, then their comparison."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.cli import show
from trtforge.cli.chosen import Chosen
from trtforge.core.errors import ForgeError

if TYPE_CHECKING:
    from trtforge.compile.stage import CompileOptions
    from trtforge.pipeline.record import Record
    from trtforge.pipeline.report import BuildReport
    from trtforge.pipeline.stages import StageName
    from trtforge.pipeline.sweep import Attempt

COMPARISON = "comparison.html"


def build_each(
    chosen: Mapping[str, Chosen],
    out: Path,
    *,
    first: "StageName" = "calibrate",
    last: "StageName" = "package",
    options: "CompileOptions | None" = None,
    force: bool = False,
    quiet: bool = False,
    json: bool = False,
) -> None:
    """Build each recipe of `chosen`, by its format; print the comparison and write `out`/comparison.html.

    A failed build does not stop the others; ForgeError is raised at the end if any failed. With `json` one object is
    printed: builds (as `trtforge compare --json`), failed, comparison, next.
    """
    from trtforge.cli.build_view import BuildView
    from trtforge.pipeline.sweep import Variant, sweep

    planned = [Variant(name, each.recipe, each.out, each.named) for name, each in chosen.items()]
    silent = quiet or json

    def build(variant: Variant) -> "BuildReport":
        with BuildView(quiet=silent) as view:
            view.header(variant.recipe, variant.out)
            asked = chosen[variant.format]
            asked.require_own()
            from trtforge.compile.stage import CompileOptions  # these imports take longer than the header may
            from trtforge.pipeline.build import Build
            from trtforge.pipeline.stages import selected

            run = Build(
                variant.recipe,
                variant.out,
                view.progress,
                force=force,
                named=variant.named,
                options=options or CompileOptions(),
            )
            return run.run(selected(variant.recipe, first, last), *asked.written_during(view.started, view.finished))

    attempts = sweep(planned, build, lambda attempt: _say(attempt, quiet=silent))
    _show(attempts, out, json=json)
    failed = [attempt.variant.format for attempt in attempts if attempt.error is not None]
    if failed:
        raise ForgeError(
            f"{len(failed)} of {len(attempts)} builds failed: {', '.join(failed)}",
            hint="The errors are above. Run the same command again to resume; what is complete is skipped.",
        )


def _say(attempt: "Attempt", *, quiet: bool) -> None:
    if attempt.error is not None:
        show.message("error:", f"{attempt.variant.format}: {attempt.error.message}")
        show.message("hint:", attempt.error.hint)
    elif not quiet:
        show.message("built", show.path(attempt.variant.out))


def _show(attempts: "Sequence[Attempt]", out: Path, *, json: bool) -> None:
    """Compare the builds that have a report, those that fail the gate included, and say what comes next."""
    from trtforge.cli.compare import show_comparison, write_comparison
    from trtforge.pipeline.build import GateError
    from trtforge.pipeline.compare import Compared
    from trtforge.pipeline.record import read_record

    found, complete = [], []
    for each in attempts:
        if isinstance(each.error, GateError):  # report.json may be of an earlier run
            found.append(Compared.of(each.variant.format, each.variant.out, each.error.report.record()))
        elif each.error is None:
            complete.append(read_record(each.variant.out))
            found.append(Compared.of(each.variant.format, each.variant.out, complete[-1]))
    following = _following(complete)
    page = out / COMPARISON
    if found:
        write_comparison(page, found)
    if json:
        failed = [
            {"format": each.variant.format, "error": each.error.message, "hint": each.error.hint}
            for each in attempts
            if each.error is not None
        ]
        builds = [build.as_json() for build in found]
        comparison = str(page) if found else None
        show.as_json({"builds": builds, "failed": failed, "comparison": comparison, "next": following})
    elif found:
        show_comparison(found)
        print(f"comparison: {show.path(page)}")
        if following is not None:
            print(f"next: {following}")


def _following(complete: "Sequence[Record]") -> str | None:
    """The next command of the smallest complete build, since all of them passed the gate; None without one."""
    smallest = min(complete, key=lambda record: record.engine_bytes or math.inf, default=None)
    return None if smallest is None else smallest.next
