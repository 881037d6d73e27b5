"""`trtforge migrate`: from an engine or a repository to the LLM API."""

from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import Force, Json, Out, Quiet, Verbose
from trtforge.core import defaults
from trtforge.core.operands import operand

if TYPE_CHECKING:
    from trtforge.migrate.migration import Migration
    from trtforge.pipeline.migration import MigrateOptions


_SOURCE = "Source and target"


def migrate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="ENGINE_OR_REPO", help="TensorRT-LLM engine or Triton model repository.", show_default=False
        ),
    ],
    out: Out,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_SOURCE,
            help="The weights: a TensorRT-LLM or Hugging Face checkpoint. Without it only model.yaml is written.",
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_SOURCE,
            help="The repository's engine, if the path in its configuration does not exist on this machine.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_SOURCE, help="The repository's model that runs the engine."),
    ] = None,
    target_version: Annotated[
        str,
        typer.Option(metavar="VERSION", rich_help_panel=_SOURCE, help="TensorRT-LLM release that will serve it."),
    ] = defaults.TENSORRT_LLM,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list the settings that were carried over or dropped.")
    ] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Migrate the settings of an engine and its server to the LLM API.

    Every setting is carried over, dropped because it needs no successor, or in need of attention. Those that need
    attention are printed; --all prints every one.

    Example: trtforge migrate ./repository ./llmapi --checkpoint ./llama-fp8
    """
    from trtforge.cli.places import artifact_at
    from trtforge.core.output_place import require_output
    from trtforge.core.progress import for_this_terminal
    from trtforge.pipeline.migration import MigrateOptions, run_migration

    source = artifact_at(source, "repository", "engine")
    require_output(out, "migration" if checkpoint is None else "engine")
    options = MigrateOptions(source, target_version, checkpoint, engine, model)
    found, made = run_migration(options, out, force=force, progress=for_this_terminal(quiet=quiet or json))
    whole = made.manifest.identity.stage == "engine"
    again = ["migrate", operand(source), "ENGINE", "--checkpoint", "DIR", *_given(options)]
    following = join(["trtforge", *(["package", operand(out), "REPOSITORY"] if whole else again)])
    if json:
        result = {"artifact": str(out), "stage": made.manifest.identity.stage, "cached": made.cached}
        show.as_json(result | found.as_json() | {"next": following})
        return
    _show(found, everything=everything)
    show.produced(made, json_output=False, next_command=following)


def _given(options: "MigrateOptions") -> list[str]:
    """The options that another run on the same source needs."""
    target = None if options.target == defaults.TENSORRT_LLM else options.target
    values = {"--engine": options.engine, "--model": options.model, "--target-version": target}
    return [word for option, value in values.items() if value is not None for word in (option, str(value))]


def _show(found: "Migration", *, everything: bool) -> None:
    """Print what needs attention, and with `everything` what became of every other setting too."""
    if everything:
        carried = [[*map(_plain, (each.key, each.value)), each.to, _plain(each.argument)] for each in found.carried]
        show.table("Carried over", ["setting", "value", "LLM argument", "value"], carried, prose=True)
        dropped = [[*map(_plain, (each.key, each.value)), each.why] for each in found.dropped]
        show.table("Dropped", ["setting", "value", "why"], dropped, prose=True)
    if found.attention:
        print("Needs attention:")
    for left in found.attention:
        said = f"  {_plain(left.key)} = {_plain(left.value)}: {left.why}"
        print(show.wrapped(said, show.width(), indent="    "))
    if not everything:
        print(f"{len(found.carried)} settings carried over, {len(found.dropped)} dropped; --all lists them")


def _plain(value: object) -> str:
    """A setting of somebody else's file as text that a terminal only shows."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))
