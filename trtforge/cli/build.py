"""`trtforge build RECIPE_OR_MODEL`: run every stage in order and print a report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import completion, show
from trtforge.cli.chosen import Choice, Chosen, choose, choose_each
from trtforge.cli.options import (
    BuildDirectory,
    Container,
    Ep,
    Force,
    GoalName,
    GpuName,
    Json,
    Pp,
    Quants,
    Quiet,
    Set,
    Tp,
    Verbose,
    Workers,
    require_heeded,
)
from trtforge.core.builds import require_build_directory
from trtforge.core.errors import UsageError

if TYPE_CHECKING:
    from trtforge.cli.build_view import BuildView
    from trtforge.core.recipe import Recipe
    from trtforge.pipeline.stages import StageName


_STAGES = "Stages"
_LOCK = "Lock file"


def build(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_MODEL",
            autocompletion=completion.recipes,
            help="Recipe file, name of a shipped recipe, model directory or hub id.",
            show_default=False,
        ),
    ],
    out: BuildDirectory = None,
    quant: Quants = None,
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    gpu: GpuName = None,
    goal: GoalName = None,
    set_: Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan of every stage; write nothing.")] = False,
    force: Force = False,
    first: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="STAGE",
            autocompletion=completion.stages,
            rich_help_panel=_STAGES,
            help="First stage to run: calibrate, convert, verify, compile or package.",
        ),
    ] = "calibrate",
    last: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="STAGE",
            autocompletion=completion.stages,
            rich_help_panel=_STAGES,
            help="Last stage to run.",
        ),
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
            show_default="forge.lock beside the recipe's file",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build a recipe or a model: calibrate, convert, verify, compile, package.

    For a model a recipe is derived, printed, written to DIR/recipe.yaml and used. Stages whose artifact is up to date
    are skipped. If the recipe is locked (forge.lock), the model is taken at the locked commit, and every other
    difference from the lock is a warning.

    Example: trtforge build demo-int4awq --set engine.max_batch_size=16

    Example: trtforge build Qwen/Qwen2.5-7B-Instruct --quant fp8 --gpu h100-80gb

    Example: trtforge build mine.yaml --locked
    """
    if update_lock and (locked or dry_run):
        raise UsageError(
            f"--update-lock with {'--locked' if locked else '--dry-run'}", hint="Give --update-lock without the other."
        )
    overrides = tuple(set_ or ())
    formats = quant.split(",") if quant is not None else []
    choice = Choice(quant, tp, pp, ep, gpu, goal)
    how = How(
        _stage(first, "--from"), _stage(last, "--to"), dry_run, force, workers, container, locked, update_lock, lock,
        quiet=quiet, json=json,
    )  # fmt: skip
    if len(formats) > 1:
        each = choose_each(target, formats, choice, overrides, out)
        require_heeded(context, each[formats[0]].recipe.engine.backend)
        build_formats(each, how)
        return
    asked = choose(target, choice, overrides, out)
    require_heeded(context, asked.recipe.engine.backend)
    build_chosen(asked, how)


@dataclass(frozen=True)
class How:
    """How to build: the options of `trtforge build` that are not about the recipe."""

    first: "StageName" = "calibrate"
    last: "StageName" = "package"
    dry_run: bool = False
    force: bool = False
    workers: int = 1
    container: str | None = None
    locked: bool = False
    update_lock: bool = False
    lock: Path | None = None
    quiet: bool = False
    json: bool = False

    def lock_of(self, asked: Chosen) -> Path:
        """The lock file."""
        from trtforge.pipeline.lock import FILE_NAME

        return self.lock or asked.lock_directory / FILE_NAME

    @property
    def of_the_lock(self) -> tuple[str, ...]:
        """The options that choose the lock and the container, which the next command needs too."""
        lock = () if self.lock is None else ("--lock", str(self.lock))
        container = () if self.container is None else ("--container", self.container)
        return (*lock, *(("--locked",) if self.locked else ()), *container)


def build_formats(asked: Mapping[str, Chosen], how: How) -> None:
    """Build recipes by format and compare the builds. Raises UsageError for options that apply to one build."""
    from trtforge.cli.sweep import build_each
    from trtforge.compile.stage import CompileOptions

    for option, given in (("--dry-run", how.dry_run), ("--locked", how.locked), ("--update-lock", how.update_lock)):
        if given:
            raise UsageError(f"{option} with several formats", hint=f"Give one format with {option}.")
    out = next(iter(asked.values())).out.parent
    for each in asked.values():
        require_build_directory(each.out)
    locked: dict[str, Chosen] = {}
    image = how.container
    for name, each in asked.items():
        say = (lambda text: None) if locked else show.warning  # the formats have one lock
        recipe, image = as_locked(each.recipe, how.lock_of(each), how.container, say=say)
        locked[name] = replace(each, recipe=recipe, options=how.of_the_lock)
    build_each(
        locked, out, first=how.first, last=how.last,
        options=CompileOptions(workers=how.workers, container=image), force=how.force, quiet=how.quiet,
        json=how.json,
    )  # fmt: skip


def build_chosen(asked: Chosen, how: How) -> None:
    """Build one recipe and show its report, or its plan with `how.dry_run`. Raises ForgeError."""
    from trtforge.cli.build_view import BuildView, print_header
    from trtforge.pipeline.stages import selected

    require_build_directory(asked.out)
    stages = selected(asked.recipe, how.first, how.last)
    with BuildView(quiet=how.quiet or how.json) as view:
        if not how.dry_run:
            view.header(asked.recipe, asked.out, asked.text)
        elif not how.json:
            print_header(asked.recipe, asked.out)
        _build(asked, how, stages, view)


def _build(asked: Chosen, how: How, stages: "tuple[StageName, ...]", view: "BuildView") -> None:
    """As `build_chosen`, below the header: these imports take longer than the header may."""
    from trtforge.cli.build_view import show_dry_run, show_report
    from trtforge.compile.stage import CompileOptions
    from trtforge.core.output_place import require_writable
    from trtforge.pipeline.build import Build, GateError
    from trtforge.pipeline.lock import pinned, write_locked
    from trtforge.pipeline.lock_facts import what_is_used, with_image
    from trtforge.pipeline.paths import Paths

    chosen, paths = asked.recipe, Paths(asked.out)

    asked, lock_file = replace(asked, options=how.of_the_lock), how.lock_of(asked)
    if how.update_lock:
        require_writable(lock_file.resolve().parent)
    used = what_is_used(chosen, lock_file, container=how.container) if how.update_lock else None
    if used is not None:
        chosen, image = pinned(chosen, used), how.container
    elif how.dry_run and not how.locked:
        image = how.container  # a dry run reads metadata only and uses no network
    else:
        chosen, image = as_locked(chosen, lock_file, how.container, strict=how.locked)
    options = CompileOptions(workers=how.workers, container=image)
    if how.dry_run:
        from trtforge.pipeline.dry_run import dry_run

        planned = dry_run(chosen, paths, stages, options)
        show.as_json(planned) if how.json else show_dry_run(planned, asked.command)
        return
    asked.require_own()
    run = Build(chosen, paths.out, view.progress, force=how.force, named=asked.named, options=options)
    try:
        report = run.run(stages, *asked.written_during(view.started, view.finished))
    except GateError as error:
        view.failed()
        show.as_json(error.report.as_json()) if how.json else show_report(error.report.record())
        raise
    if used is not None:
        write_locked(lock_file, chosen.name, with_image(used, chosen, how.container))
        view.say(f"{lock_file} locks {chosen.name}")
    show.as_json(report.as_json()) if how.json else show_report(report.record())


def as_locked(
    recipe: "Recipe",
    lock_file: Path,
    container: str | None,
    *,
    strict: bool = False,
    say: Callable[[str], None] = show.warning,
) -> "tuple[Recipe, str | None]":
    """The recipe at the locked commit, and the container image at its locked digest if the lock has one.

    Other differences from the lock are warnings, which `say` gets, or raise ForgeError if `strict`.
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
        say(f"{lock_file}: {difference}")
    return pinned(recipe, locked), pinned_image(locked, found) or container


def _stage(name: str, option: str) -> "StageName":
    from trtforge.pipeline.stages import STAGES

    for stage in STAGES:
        if stage == name:
            return stage
    raise typer.BadParameter(f"{name} is not a stage: {', '.join(STAGES)}", param_hint=option)
