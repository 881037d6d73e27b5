"""`trtforge compare`: builds side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import Json, Verbose
from trtforge.core.new_file import not_written
from trtforge.core.replace import replace_text

if TYPE_CHECKING:
    from trtforge.pipeline.compare import Compared

_WIDEST_NAME = 24


def compare(
    builds: Annotated[
        list[Path], typer.Argument(metavar="BUILD...", help="Build directories, two or more.", show_default=False)
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the comparison as an HTML page.")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare builds: size, quality, times, speed.

    The reports of the builds are read; nothing is built or run. Speeds are the plan's estimates for the target GPU and,
    if `trtforge bench` was run, its measurements. Differences of quality from the first build have 95 % intervals,
    paired over the evaluated text.

    Example: trtforge compare build/demo-fp8 build/demo-int4awq --html comparison.html
    """
    from trtforge.pipeline.compare import compared
    from trtforge.pipeline.differences import differences

    found = compared(builds)
    if html is not None:
        write_comparison(html, found)
    if json:
        show.as_json(
            {
                "builds": [build.as_json() for build in found],
                "differences": [each.as_json() for each in differences(found)],
            }
        )
    else:
        show_comparison(found)


def show_comparison(builds: "Sequence[Compared]") -> None:
    """Print the builds as columns, as many beside one another as fit the width."""
    from trtforge.pipeline.compare import conditions, notes
    from trtforge.pipeline.differences import TITLES, UNKNOWN, differences

    width = show.width()
    found = {each.name: each for each in differences(builds)}
    titles = ["", *builds[0].figures, *TITLES]
    columns = [
        [
            show.shortened(build.name, _WIDEST_NAME),
            *build.figures.values(),
            *(found[build.name].figures.values() if build.name in found else "-" * len(TITLES)),
        ]
        for build in builds
    ]
    known = [row for row in range(len(titles)) if row == 0 or any(column[row] != "-" for column in columns)]
    first = max(map(len, titles))
    while columns:
        fitting, used = 0, first
        for column in columns:
            used += 2 + max(map(len, column))
            if fitting and used > width:
                break
            fitting += 1
        shown, columns = columns[:fitting], columns[fitting:]
        rows = [[titles[row], *(column[row] for column in shown)] for row in known]
        print("\n".join(show.columns(rows, right=range(1, fitting + 1))))
        if columns:
            print()
    for difference in found.values():
        if difference.reason not in (None, UNKNOWN):
            show.line(difference.line)
    for line in (*notes(builds), *conditions(builds)):
        show.line(line)


def write_comparison(path: Path, builds: "Sequence[Compared]") -> None:
    """Write the comparison as an HTML page, whole or not at all. Raises ForgeError if it cannot be written."""
    from trtforge.pipeline.report_pages import compare_page

    page = compare_page(builds)
    try:
        if path.is_file() or not path.exists():
            replace_text(path.resolve(), page)
        else:  # a pipe, or /dev/stdout
            path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise not_written(path, error) from None
