"""`trtforge init`: write the recipe that suits a model."""

from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import show
from trtforge.cli.chosen import Choice, derived, is_model, located
from trtforge.cli.options import Ep, GoalName, GpuName, Json, Pp, Quant, Tp, Verbose
from trtforge.core.errors import mistyped
from trtforge.core.nearest import nearest_directory
from trtforge.core.new_file import write_new
from trtforge.core.operands import operand
from trtforge.core.recipe_text import recipe_name


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub id.", show_default=False)],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The new recipe; must not exist.", show_default="MODEL[-FORMAT].yaml"),
    ] = None,
    quant: Quant = None,
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    gpu: GpuName = None,
    goal: GoalName = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a recipe for a model, with comments on what was chosen.

    Values not given are those that `trtforge plan --alternatives` ranks first for the GPU and the goal; without --goal,
    the usual format of the GPU on the fewest GPUs.

    Example: trtforge init Qwen/Qwen2.5-7B-Instruct --gpu h100-80gb --goal throughput
    """
    from shlex import join

    model = located(model)
    if not is_model(model):
        raise mistyped(
            f"{model}: neither a model directory (with config.json) nor a hub id (owner/name)",
            model,
            nearest_directory(Path(model)),
            otherwise="Give a model; `trtforge recipes copy` copies a recipe.",
        )
    name = None if file is None else recipe_name(file.stem) or None
    found = derived(model, Choice(quant, tp, pp, ep, gpu, goal), name)
    recipe = found.recipe()
    path = file or Path(f"{recipe.name}.yaml")
    command = join(("trtforge", "build", operand(path)))
    write_new(path, found.text(command, path.parent))
    if json:
        show.as_json({"recipe": str(path), "reasons": dict(found.reasons), "next": command})
    else:
        print(f"{show.path(path)} written; next: {command}")
