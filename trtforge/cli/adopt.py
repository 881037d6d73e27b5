"""`trtforge adopt`: write the manifest of a checkpoint or engine from another tool."""

from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import Json, Quiet, Verbose


def adopt(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="TensorRT-LLM checkpoint or engine that trtforge did not write.",
            show_default=False,
        ),
    ],
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the manifest of a checkpoint or engine from another tool.

    config.json, tensors and scaling factors are checked first, and nothing is written if they contradict each other.
    Lists the facts that the files do not show, such as their source model. Other files are not changed.

    Example: trtforge adopt ./llama-fp8-tp2
    """
    from trtforge.core.progress import for_this_terminal
    from trtforge.pipeline.adoption import adopt as run

    found = run(directory, for_this_terminal(quiet=quiet or json))
    manifest = found.manifest
    if json:
        show.as_json(
            {
                "stage": manifest.identity.stage,
                "artifact": str(directory),
                "bytes": manifest.total_bytes,
                "files": len(manifest.files),
                "cached": found.already,
                "digest": manifest.digest,
                "versions": manifest.identity.versions,
                "tensors_checked": found.tensors,
                "unknown": list(found.unknown),
                "next": found.next_command,
            }
        )
        return
    checked = f"{found.tensors} tensors checked, " if found.tensors else ""
    verb = "has its manifest already" if found.already else "adopted"
    size = f"{checked}{len(manifest.files)} files, {show.size(manifest.total_bytes)}"
    show.line(f"{manifest.identity.stage} {show.path(directory)} {verb}: {size}")
    for number, text in enumerate(found.unknown):
        show.line(f"{'unknown: ' if number == 0 else '         '}{text}")
    if found.next_command is not None:
        print(f"next: {found.next_command}")
