"""`trtforge build RECIPE`: run every stage in order and print a report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import Container, Force, Json, Quiet, Set, Verbose, Workers, require_heeded
from trtforge.core.errors import UsageError

if TYPE_CHECKING:
    from trtforge.core.recipe import Recipe
    from trtforge.pipeline.build import StageName
    from trtforge.pipeline.report import BuildReport


_STAGES = "Stages"
_LOCK = "Lock file"


def build(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a shipped recipe.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Build directory.", show_default="build/<recipe>")
    ] = None,
    set_: Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan of every stage; write nothing.")] = False,
    force: Force = False,
    first: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="STAGE",
            rich_help_panel=_STAGES,
            help="First stage to run: calibrate, convert, verify, compile or package.",
        ),
    ] = "calibrate",
    last: Annotated[
        str, typer.Option("--to", metavar="STAGE", rich_help_panel=_STAGES, help="Last stage to run.")
    ] = "package",
    workers: Workers = 1,
    container: Container = None,
    locked: Annotated[
        bool,
        typer.Option("--locked", rich_help_panel=_LOCK, help="Fail if anything differs from the lock file."),
    ] = False,
    update_lock: Annotated[
        bool,
        typer.Option("--update-lock", rich_help_panel=_LOCK, help="Write what this build uses to the lock file."),
    ] = False,
    lock: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_LOCK,
            help="Lock file.",
            show_default="forge.lock beside the recipe",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build a recipe: calibrate, convert, verify, compile, package.

    Stages whose artifact is up to date are skipped. If the recipe is locked (forge.lock), the model is taken at the
    locked commit, and every other difference from the lock is a warning.

    Example: trtforge build demo-int4awq --set engine.max_batch_size=16

    Example: trtforge build mine.yaml --locked
    """
    from shlex import join

    from rich.console import Console

    from trtforge.cli.recipes import find
    from trtforge.compile.stage import CompileOptions
    from trtforge.core.progress import for_this_terminal
    from trtforge.core.recipe import load_recipe
    from trtforge.pipeline.build import Build, GateError, Paths, selected
    from trtforge.pipeline.lock import FILE_NAME, pinned, write_locked
    from trtforge.pipeline.lock_facts import what_is_used, with_image

    if update_lock and (locked or dry_run):
        raise UsageError(
            f"--update-lock with {'--locked' if locked else '--dry-run'}", hint="Give --update-lock without the other."
        )
    chosen = load_recipe(find(recipe), tuple(set_ or ()))
    require_heeded(context, chosen.engine.backend)
    lock_file = lock or (Path(recipe).parent if Path(recipe).is_file() else Path()) / FILE_NAME
    stages = selected(chosen, _stage(first, "--from"), _stage(last, "--to"))
    used = what_is_used(chosen, lock_file, container=container) if update_lock else None
    if used is not None:
        chosen, image = pinned(chosen, used), container
    elif dry_run and not locked:
        image = container  # a dry run reads metadata only and uses no network
    else:
        chosen, image = as_locked(chosen, lock_file, container, strict=locked)
    paths = Paths(out or Path("build") / chosen.name)
    options = CompileOptions(workers=workers, container=image)
    if dry_run:
        from trtforge.pipeline.dry_run import dry_run as plan

        show.as_json(plan(chosen, paths, stages, options))
        return
    named = join([recipe, *(word for value in set_ or () for word in ("--set", value))])
    log = Console(stderr=True, quiet=quiet or json, highlight=False)
    run = Build(chosen, paths.out, for_this_terminal(quiet=quiet or json), force=force, named=named, options=options)
    try:
        report = run.run(stages, started=lambda stage: log.print(f"[bold]{stage}[/bold]"))
    except GateError as error:
        if json:
            show.as_json(error.report.as_json())
        raise
    if used is not None:
        write_locked(lock_file, chosen.name, with_image(used, chosen, container))
        log.print(f"{lock_file} locks {chosen.name}")
    if json:
        show.as_json(report.as_json())
    else:
        _show(report)


def as_locked(recipe: "Recipe", lock_file: Path, container: str | None, *, strict: bool) -> "tuple[Recipe, str | None]":
    """The recipe at the locked commit, and the container image at its locked digest if the lock has one.

    Other differences from the lock are warnings, or raise ForgeError if `strict`.
    """
    from trtforge.pipeline.lock import differences, pinned, pinned_image, read_locked, require_locked
    from trtforge.pipeline.lock_facts import what_is_used

    locked = read_locked(lock_file, recipe.name)
    if locked is None and not strict:
        return recipe, container
    found = what_is_used(recipe, lock_file, locked, container=container, contents=strict)
    if strict:
        require_locked(lock_file, recipe.name, locked, found)
    if locked is None:
        return recipe, container
    for difference in differences(locked, found):
        show.warning(f"{lock_file}: {difference}")
    return pinned(recipe, locked), pinned_image(locked, found) or container


def _stage(name: str, option: str) -> "StageName":
    from trtforge.pipeline.build import STAGES

    for stage in STAGES:
        if stage == name:
            return stage
    raise typer.BadParameter(f"{name} is not a stage: {', '.join(STAGES)}", param_hint=option)


def _show(report: "BuildReport") -> None:
    rows = [
        [
            stage.stage,
            stage.artifact or "-",
            show.size(stage.bytes) if stage.bytes else "-",
            stage.origin if stage.cached else f"{stage.seconds:.1f} s",
            show.size(stage.peak_memory),
        ]
        for stage in report.stages
    ]
    show.table(f"Build {report.recipe}", ["stage", "artifact", "size", "time", "peak memory"], rows)
    if report.compression is not None and report.compression > 1:
        print(f"compression of the quantised linears: {report.compression:.2f} times")
    if report.verification is not None:
        found = report.verification
        perplexity = found.perplexity
        print(
            f"perplexity: {perplexity.candidate:.3f}, Hugging Face model {perplexity.reference:.3f} "
            f"({perplexity.increase:+.2%}); top-1 agreement {found.top1_agreement:.2%} over {found.tokens} tokens"
        )
    print(f"next: {report.next_command}")
