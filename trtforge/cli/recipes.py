"""`trtforge recipes`: the recipes that ship, and checks of one's own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import show
from trtforge.cli.options import Json, Verbose
from trtforge.core.assets import asset_directory
from trtforge.core.errors import ForgeError

if TYPE_CHECKING:
    from trtforge.core.recipe import Recipe

recipes = typer.Typer(help="List, show, copy and check recipes.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(recipes, name="recipes", rich_help_panel="Main")


def shipped() -> tuple[Path, ...]:
    """The recipe files that travel with the program."""
    return tuple(sorted(asset_directory("recipes").glob("*.yaml")))


def find(recipe: str) -> Path:
    """A recipe by path or by the name of one that ships. Raises ForgeError with the nearest name."""
    path = Path(recipe)
    if path.is_file():
        return path
    by_name = {file.stem: file for file in shipped()}
    if recipe in by_name:
        return by_name[recipe]
    from difflib import get_close_matches

    nearest = get_close_matches(recipe, by_name, n=1, cutoff=0.4)
    raise ForgeError(
        f"{recipe}: neither a recipe file nor one that ships",
        hint=f"Did you mean {nearest[0]}?" if nearest else f"Shipped: {', '.join(by_name)}.",
    )


@recipes.command("list")
def list_recipes(json: Json = False, verbose: Verbose = False) -> None:
    """The recipes that ship: model, formats, layout and GPUs.

    [dim]Example: trtforge recipes list[/dim]
    """
    from trtforge.core.recipe import load_recipe, recipe_text

    found = [(load_recipe(path), recipe_text(path).splitlines()[0].lstrip("# ")) for path in shipped()]
    if json:
        show.as_json({"recipes": [_summary(recipe, about) for recipe, about in found]})
        return
    rows = [("NAME", "MODEL", "WEIGHTS, KV", "LAYOUT", "GPUS"), *(_row(recipe) for recipe, _ in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def _row(recipe: "Recipe") -> tuple[str, ...]:
    quant, parallel, gpu = recipe.quantization, recipe.parallel, recipe.engine.target.gpu
    return (
        recipe.name,
        Path(recipe.model.source).name,
        f"{quant.format}, {quant.kv_cache}",
        f"tp {parallel.tp}, pp {parallel.pp}",
        f"{parallel.tp * parallel.pp} x {gpu}" if gpu else "none needed",
    )


def _summary(recipe: "Recipe", about: str) -> dict[str, Any]:
    quant, parallel, engine = recipe.quantization, recipe.parallel, recipe.engine
    return {
        "name": recipe.name,
        "about": about,
        "model": recipe.model.source,
        "format": quant.format,
        "kv_cache": quant.kv_cache,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "ep": parallel.ep,
        "gpu": engine.target.gpu,
        "gpus": parallel.tp * parallel.pp,
        "max_batch_size": engine.max_batch_size,
        "max_seq_len": engine.max_seq_len,
    }


@recipes.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe name or file.")],
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print a recipe, or with --json every value it amounts to.

    [dim]Example: trtforge recipes show demo-int4awq[/dim]
    """
    path = find(name)
    if json:
        from trtforge.core.recipe import load_recipe

        show.as_json(load_recipe(path).model_dump(mode="json"))
    else:
        from trtforge.core.recipe import recipe_text

        print(recipe_text(path), end="")


@recipes.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe name or file.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; must not exist.")],
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Copy a recipe to start one's own from, under the name of the file.

    [dim]Example: trtforge recipes copy demo-int4awq mine.yaml[/dim]
    """
    import re

    from trtforge.core.recipe import load_recipe, paths_in, recipe_text

    path = find(name)
    text = recipe_text(path)
    for relative, absolute in paths_in(path).items():
        quoted = re.escape(relative)
        text = re.sub(rf"(?m)((?:[:\[,]|^\s*-) *[\"']?){quoted}(?=[\"']?\s*(?:[],}}#]|$))", rf"\g<1>{absolute}", text)
    old = load_recipe(path).name
    new = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-") or old
    text = re.sub(rf"(?m)^name: {re.escape(old)}\b", f"name: {new}", text)
    text = re.sub(rf"(?m)^(# trtforge build ){re.escape(old)}\b", lambda found: f"{found[1]}{file}", text)
    try:
        with file.open("x") as target:
            target.write(text)
    except OSError as error:
        raise ForgeError(f"{file}: {error.strerror}", hint="Choose a file that does not exist yet.") from None
    if json:
        show.as_json({"recipe": str(file), "next": f"trtforge build {file}"})
    else:
        print(f"{file} written; next: trtforge build {file}")


@recipes.command("validate")
def validate_recipe(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Recipe file or name.")],
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check a recipe's keys and values; whether it can be deployed, `trtforge build RECIPE --dry-run` says.

    [dim]Example: trtforge recipes validate mine.yaml[/dim]
    """
    from trtforge.core.recipe import load_recipe

    recipe = load_recipe(find(file))
    if json:
        show.as_json({"valid": True, "name": recipe.name})
    else:
        print(f"{file} is valid: {recipe.name}; next: trtforge build {file} --dry-run")


@recipes.command("schema")
def schema(json: Json = False, verbose: Verbose = False) -> None:
    """Print the JSON schema of recipes, for editors.

    [dim]Example: trtforge recipes schema > recipe.schema.json[/dim]
    """
    from trtforge.core.recipe import Recipe

    show.as_json(Recipe.model_json_schema())
