"""`trtforge build RECIPE`: every stage in order, and a report at the end."""

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


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("build", rich_help_panel="Main")(build)


def build(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file or a shipped recipe's name.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the build.", show_default="build/<recipe>")] = None,
    first: Annotated[str, typer.Option("--from", metavar="STAGE", help="First stage to run.")] = "calibrate",
    last: Annotated[str, typer.Option("--to", metavar="STAGE", help="Last stage to run.")] = "package",
    workers: Workers = 1,
    container: Container = None,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every stage's exact plan; write nothing.")] = False,
    locked: Annotated[bool, typer.Option("--locked", help="Refuse to build with anything but what is locked.")] = False,
    update_lock: Annotated[bool, typer.Option("--update-lock", help="Lock what this build uses.")] = False,
    lock: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The lock file.", show_default="forge.lock beside the recipe"),
    ] = None,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Turn a checkpoint into a served engine: calibrate, convert, verify, compile, package.

    A stage whose artifact is already right is skipped. Where the recipe is locked (forge.lock), the model is taken at
    the locked commit, and what else differs is said.

    [dim]Example: trtforge build demo-int4awq --out build/demo --set engine.max_batch_size=16[/dim]

    [dim]Example: trtforge build mine.yaml --update-lock, and later trtforge build mine.yaml --locked[/dim]
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
            f"--update-lock with {'--locked' if locked else '--dry-run'}", hint="Lock what a build used, by itself."
        )
    chosen = load_recipe(find(recipe), tuple(set_ or ()))
    require_heeded(context, chosen.engine.backend)
    lock_file = lock or (Path(recipe).parent if Path(recipe).is_file() else Path()) / FILE_NAME
    stages = selected(chosen, _stage(first, "--from"), _stage(last, "--to"))
    used = what_is_used(chosen, lock_file, container=container) if update_lock else None
    if used is not None:
        chosen, image = pinned(chosen, used), container
    elif dry_run and not locked:
        image = container  # from metadata alone, and without a network
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
    """The recipe at the locked commit, and the container by its locked content where the lock knows that.

    What else differs from the lock is a warning; `strict`: raises ForgeError.
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
