"""`trtforge migrate`: from an engine to the LLM API."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import Force, Json, Out, Quiet, Verbose

if TYPE_CHECKING:
    from trtforge.migrate.migration import Migration


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("migrate", rich_help_panel="Stages")(migrate)


def migrate(
    source: Annotated[
        Path, typer.Argument(metavar="ENGINE_OR_REPO", help="Anybody's engine or repository.", show_default=False)
    ],
    out: Out,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="The weights: a checkpoint or a Hugging Face directory; left out: model.yaml only."),
    ] = None,
    engine: Annotated[
        Path | None, typer.Option(help="The engine of a repository whose own path to it does not hold here.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The repository's model that serves the engine.")] = None,
    target_version: Annotated[str, typer.Option(help="TensorRT-LLM release that will serve it.")] = "1.2.1",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Turn an engine's and its server's settings into the LLM API's, and account for every one of them.

    [dim]Example: trtforge migrate ./repository ./llmapi --checkpoint ./llama-fp8 --target-version 1.3.0[/dim]
    """
    from trtforge.core.progress import for_this_terminal
    from trtforge.pipeline.migration import MigrateOptions, run_migration

    options = MigrateOptions(source, target_version, checkpoint, engine, model)
    found, made = run_migration(options, out, force=force, progress=for_this_terminal(quiet=quiet or json))
    whole = made.manifest.identity.stage == "engine"
    following = f"trtforge package {out} REPOSITORY" if whole else f"trtforge migrate {source} ENGINE --checkpoint DIR"
    if json:
        result = {"artifact": str(out), "stage": made.manifest.identity.stage, "cached": made.cached}
        show.as_json(result | found.as_json() | {"next": following})
        return
    _show(found)
    show.produced(made, json_output=False, next_command=following)


def _show(found: "Migration") -> None:
    carried = [[entry.key, str(entry.value), entry.to, str(entry.argument)] for entry in found.carried]
    show.table("Carried over", ["setting", "value", "LLM argument", "value"], carried, prose=True)
    for title, entries in (("Needs attention", found.attention), ("Dropped", found.dropped)):
        if entries:
            rows = [[entry.key, str(entry.value), entry.why] for entry in entries]
            show.table(title, ["setting", "value", "why"], rows, prose=True)
