"""`trtforge recipes`: list and show the shipped recipes, copy and validate recipes."""

import sys
from collections.abc import Collection
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import completion, show
from trtforge.cli.help import Command, Group
from trtforge.cli.options import Json, Verbose
from trtforge.core.assets import asset_directory
from trtforge.core.builds import RECIPE_FILE, REPORT_FILE, require_one_build
from trtforge.core.errors import ForgeError, Repair, mistyped
from trtforge.core.new_file import write_new
from trtforge.core.operands import operand

if TYPE_CHECKING:
    from trtforge.core.recipe import Recipe

recipes = typer.Typer(
    cls=Group,
    help="List, show, copy and validate recipes.\n\nExample: trtforge recipes list",
    no_args_is_help=True,
)


_SUFFIXES = (".yaml", ".yml")
_SHOWN = 3  # names that a hint proposes


def shipped() -> tuple[Path, ...]:
    """The recipe files that are installed with the program."""
    return tuple(sorted(asset_directory("recipes").glob("*.yaml")))


def find(recipe: str, *, models: bool = False) -> Path:
    """A recipe by its path, or a shipped one by its name. Raises ForgeError with the nearest name.

    `models`: the command takes models too, so a model's directory may have been meant.
    """
    path = Path(recipe)
    if path.is_file():
        _refuse_file_of_model(path, models=models)
        return path
    by_name = {file.stem: file for file in shipped()}
    if recipe in by_name:
        return by_name[recipe]
    if path.is_dir():
        raise _no_recipe_in(path, recipe, models=models)
    raise _nothing_at(recipe, by_name, models=models)


def _refuse_file_of_model(path: Path, *, models: bool) -> None:
    """Raises ForgeError for a file of a model where a recipe is read."""
    directory = path.parent
    if path.suffix not in (".json", ".safetensors") or not (directory / "config.json").is_file():
        return
    if models:
        hint, repair = "Give the model's directory.", Repair(str(path), str(directory))
    else:
        hint, repair = f"`{join(['trtforge', 'init', operand(directory)])}` writes a recipe for the model.", None
    raise ForgeError(f"{path} is a file of a model, not a recipe", hint=hint).repaired_by(repair)


def _no_recipe_in(path: Path, recipe: str, *, models: bool) -> ForgeError:
    """The error for a directory, which is no recipe. `models`: see `find`."""
    if (path / "config.json").is_file():
        hint = f"It is a model: `{join(['trtforge', 'init', recipe])}` writes a recipe for it."
        return ForgeError(f"{recipe} is not a recipe", hint=hint)
    if models:
        require_one_build(path, RECIPE_FILE)
    if models and (path / REPORT_FILE).is_file():
        hint = "Give the recipe and --out DIR"
        if (path / "repository").is_dir():
            hint += f", or run it as it is: `{join(['trtforge', 'run', recipe])}`"
        else:
            from trtforge.cli.places import require_gate  # --help reads no YAML

            require_gate(path, "repository")
        return ForgeError(f"{recipe} is a build that does not contain its recipe", hint=f"{hint}.")
    if models:
        hint = "A model has config.json and safetensors. Give one, a recipe, or a name from `trtforge recipes list`."
        return ForgeError(f"{recipe} contains neither a model nor a build", hint=hint)
    hint = "Give a recipe file, or a name from `trtforge recipes list`."
    return ForgeError(f"{recipe} is a directory, not a recipe", hint=hint)


def _nothing_at(recipe: str, names: Collection[str], *, models: bool) -> ForgeError:
    """The error for a recipe that does not exist, with a file beside it or a shipped name that is close."""
    from trtforge.core.nearest import nearest_name, nearest_path

    path = Path(recipe)
    is_path = "/" in recipe or path.suffix in _SUFFIXES
    near: object | None = nearest_path(path, lambda each: each.suffix in _SUFFIXES or (models and each.is_dir()))
    name = path.stem if path.suffix in _SUFFIXES else recipe
    if near is None and "/" not in recipe:
        near = nearest_name(name, names)
    like = ", ".join([each for each in names if each.startswith(name)][:_SHOWN])
    give = "a model's directory or hub id, a build" if models else "a recipe file"
    hint = f"Give {give}, or a name from `trtforge recipes list`{f', such as {like}' if like else ''}."
    absent = f"{recipe}: no such file or directory"
    named = f"{recipe}: no such file or directory, and no recipe of this name ships with trtforge"
    return mistyped(absent if is_path else named, recipe, near, otherwise=hint)


@recipes.command("list", cls=Command)
def list_recipes(json: Json = False, verbose: Verbose = False) -> None:
    """List the shipped recipes: model, formats, layout, GPUs.

    Example: trtforge recipes list
    """
    from trtforge.core.recipe import load_recipe, recipe_text

    found = [(load_recipe(path), recipe_text(path).splitlines()[0].lstrip("# ")) for path in shipped()]
    if json:
        show.as_json({"recipes": [_summary(recipe, about) for recipe, about in found]})
        return
    rows = [("NAME", "MODEL", "WEIGHTS, KV", "LAYOUT", "GPUS"), *(_row(recipe) for recipe, _ in found)]
    if sys.stdout.isatty():
        excess = max(map(len, show.columns(rows))) - show.width(sys.stdout)
        room = max(len(row[1]) for row in rows) - max(0, excess)
        rows = [(row[0], show.shortened(row[1], max(room, 12)), *row[2:]) for row in rows]
    print("\n".join(show.columns(rows)))


def _row(recipe: "Recipe") -> tuple[str, ...]:
    quant, parallel, gpu = recipe.quantization, recipe.parallel, recipe.engine.target.gpu
    return (
        recipe.name,
        Path(recipe.model.source).name,
        f"{_published_format(recipe) or quant.format}, {quant.kv_cache}",
        f"tp {parallel.tp}, pp {parallel.pp}",
        f"{parallel.tp * parallel.pp} x {gpu}" if gpu else "none needed",
    )


def _published_format(recipe: "Recipe") -> str | None:
    """The format in which the model was published, if it is served so; None if its weights are converted."""
    from trtforge.plan.known import known_config
    from trtforge.plan.published import published_format, served_as_published

    config = known_config(recipe.model.source)
    if config is None or not served_as_published(config, recipe.engine.backend, recipe.quantization.format):
        return None
    return published_format(config)


def _summary(recipe: "Recipe", about: str) -> dict[str, Any]:
    quant, parallel, engine = recipe.quantization, recipe.parallel, recipe.engine
    return {
        "name": recipe.name,
        "about": about,
        "model": recipe.model.source,
        "format": quant.format,
        "published_format": _published_format(recipe),
        "kv_cache": quant.kv_cache,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "ep": parallel.ep,
        "gpu": engine.target.gpu,
        "gpus": parallel.tp * parallel.pp,
        "max_batch_size": engine.max_batch_size,
        "max_seq_len": engine.max_seq_len,
    }


@recipes.command("show", cls=Command)
def show_recipe(
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=completion.recipes, help="Recipe name or file.")
    ],
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print a recipe; with --json all its values, defaults included.

    Example: trtforge recipes show demo-int4awq
    """
    path = find(name)
    if json:
        from trtforge.core.recipe import load_recipe

        show.as_json(load_recipe(path).model_dump(mode="json"))
    else:
        from trtforge.core.recipe import recipe_text

        print(recipe_text(path), end="")


@recipes.command("copy", cls=Command)
def copy_recipe(
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=completion.recipes, help="Recipe name or file.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new recipe; must not exist.")],
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Copy a recipe to FILE and rename it after the file.

    Example: trtforge recipes copy demo-int4awq mine.yaml
    """
    from trtforge.core.recipe_copy import copied_text

    write_new(file, copied_text(find(name), file))
    following = join(["trtforge", "build", operand(file)])
    if json:
        show.as_json({"recipe": str(file), "next": following})
    else:
        print(f"{file} written; next: {following}")


@recipes.command("validate", cls=Command)
def validate_recipe(
    file: Annotated[
        str, typer.Argument(metavar="FILE", autocompletion=completion.recipes, help="Recipe file or name.")
    ],
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check the keys and values of a recipe.

    To check that it can be deployed, use `trtforge build RECIPE --dry-run`.

    Example: trtforge recipes validate mine.yaml
    """
    from trtforge.core.recipe import load_recipe

    recipe = load_recipe(find(file))
    if json:
        show.as_json({"valid": True, "name": recipe.name})
    else:
        print(f"{file} is valid: {recipe.name}; next: {join(['trtforge', 'build', file, '--dry-run'])}")


@recipes.command("schema", cls=Command)
def schema(json: Json = False, verbose: Verbose = False) -> None:
    """Print the JSON schema of recipes, for editors.

    Example: trtforge recipes schema > recipe.schema.json
    """
    from trtforge.core.recipe import Recipe

    show.as_json(Recipe.model_json_schema())
