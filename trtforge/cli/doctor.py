"""`trtforge doctor`: check this machine, or explain the first real error of a log."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from trtforge.cli import completion, show
from trtforge.cli.options import Json, Set, Verbose
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.figures import counted

if TYPE_CHECKING:
    from trtforge.doctor.finding import Report
    from trtforge.doctor.log import Diagnosis, Explained, Seen
    from trtforge.doctor.serving_checks import Serving


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=completion.recipes,
            help="Check what this recipe requires.",
            show_default=False,
        ),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Explain the first real error of a log instead; - reads standard input."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Check that the driver supports a Triton image: image, tag or release (26.05)."
        ),
    ] = None,
    set_: Set = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check this machine, or explain the first real error of a log.

    Exit status 1 if a check fails or the log has an error.

    Example: trtforge doctor demo-int4awq

    Example: trtforge doctor --image 26.05-trtllm-python-py3

    Example: mpirun --tag-output -n 4 ... 2>&1 | trtforge doctor --log -
    """
    if log is None:
        _examine(recipe, image, set_ or (), json_output=json)
        return
    if recipe is not None or image is not None or set_:
        raise UsageError("--log cannot be combined with a recipe, --image or --set", hint="Give --log alone.")
    _explain(log, json_output=json)


def _examine(name: str | None, image: str | None, overrides: Sequence[str], *, json_output: bool) -> None:
    from trtforge.doctor.machine import examine
    from trtforge.doctor.needs import Needs, needs_of
    from trtforge.machine.host import Host

    if name is None:
        if overrides:
            raise UsageError("--set without a recipe", hint="Give the recipe whose key it overrides.")
        needs = Needs()
    else:
        from trtforge.cli.recipes import find
        from trtforge.compile.machine import this_machine
        from trtforge.core.recipe import load_recipe

        needs = needs_of(load_recipe(find(name), tuple(overrides)), this_machine().backend)
    report = examine(Host(), needs, _serving(), image)
    if json_output:
        show.as_json(report.as_json())
    else:
        _show_report(report)
    if report.problems:
        first, *others = report.problems
        more = f" (and {len(others)} more)" if others else ""
        raise ForgeError(f"{first.name}: {first.found}{more}", hint=first.todo)


def _serving() -> "Serving":
    """What `trtforge serve` would use; nothing is written."""
    from trtforge.doctor.serving_checks import Serving, Triton
    from trtforge.serve.config import ServeConfig
    from trtforge.serve.installation import find_installation

    ports = ServeConfig().ports
    try:
        installation = find_installation(Path())
    except ForgeError as error:
        return Serving(ports, Triton(None, todo=error.hint))
    program = str(installation.program)
    return Serving(ports, Triton(program, of_wheel=bool(installation.links), release=installation.release))


def _show_report(report: "Report") -> None:
    title = f"Fit for {report.recipe}" if report.recipe else "This machine"
    rows = [
        [finding.name, finding.status, finding.found + (f"\ndo: {finding.todo}" if finding.todo else "")]
        for finding in report.findings
    ]
    show.table(title, ["check", "status", "result"], rows, prose=True)


def _explain(log: str, *, json_output: bool) -> None:
    from trtforge.doctor.log import diagnose
    from trtforge.doctor.log_lines import numbered_pieces

    name = "standard input" if log == "-" else log
    with _opened(log) as stream:
        diagnosis = diagnose(numbered_pieces(stream))
    if json_output:
        show.as_json({"log": name, **_diagnosis_json(diagnosis)})
    else:
        _show_diagnosis(diagnosis)
    if diagnosis.first is not None:
        raise ForgeError(f"{name}:{diagnosis.first.at.line}: {diagnosis.first.pattern.title}", hint=diagnosis.first.do)
    if diagnosis.unexplained:
        raise ForgeError(
            f"{name}:{diagnosis.unexplained[-1].line}: an unrecognised error",
            hint="Start with the lines above: later errors are usually its consequences.",
        )


@contextmanager
def _opened(log: str) -> Iterator[BinaryIO]:
    if log == "-":
        yield sys.stdin.buffer
        return
    try:
        with open(log, "rb") as stream:
            yield stream
    except OSError as error:
        raise ForgeError(f"{log}: {error.strerror}", hint="Give a log file, or - for standard input.") from None


def _diagnosis_json(diagnosis: "Diagnosis") -> dict[str, Any]:
    first = diagnosis.first
    return {
        "error": diagnosis.failed,
        "recognised": first is not None,
        "diagnosis": _explained_json(first) if first is not None else None,
        "unexplained": [asdict(seen) for seen in diagnosis.unexplained],
        "secondary": [_explained_json(each) for each in diagnosis.later],
        "warnings": [_explained_json(each) for each in diagnosis.warnings],
        "ranks": list(diagnosis.ranks),
        "lines": diagnosis.lines,
    }


def _explained_json(explained: "Explained") -> dict[str, Any]:
    return {
        "id": explained.pattern.id,
        "title": explained.pattern.title,
        "line": explained.at.line,
        "rank": explained.at.rank,
        "means": explained.means,
        "do": explained.do,
        "values": explained.values,
        "sources": list(explained.pattern.sources),
        "lines": [asdict(seen) for seen in explained.lines],
        "times": explained.times,
    }


def _show_diagnosis(diagnosis: "Diagnosis") -> None:
    first = diagnosis.first
    if first is not None:
        print(f"first error: {first.pattern.title}")
        _show_lines(first.lines)
        print(f"means: {first.means}")
        print(f"do: {first.do}")
        print(f"source: {', '.join(first.pattern.sources)}")
    if diagnosis.unexplained:
        print("unrecognised, before it:" if first is not None else "first error: not recognised")
        _show_lines(diagnosis.unexplained)
    if not diagnosis.failed:
        print(f"no error in {counted(diagnosis.lines, 'line')}")
    _show_others("later errors:", diagnosis.later)
    _show_others("warnings:", diagnosis.warnings)


def _show_others(title: str, others: Sequence["Explained"]) -> None:
    if others:
        print(title)
    for other in others:
        times = f", {other.times} times" if other.times > 1 else ""
        print(f"  {_place(other.at)}: {other.pattern.title}{times}")
        print(f"    {other.means}")


def _show_lines(lines: Sequence["Seen"]) -> None:
    for seen in lines:
        print(f"  {_place(seen)}: {seen.text}")


def _place(seen: "Seen") -> str:
    return f"line {seen.line}" if seen.rank is None else f"line {seen.line}, rank {seen.rank}"
