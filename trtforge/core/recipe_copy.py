"""Copies of recipes: another name, absolute paths and another command in the comments, all else as it is written."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.operands import operand
from trtforge.core.recipe import Recipe, load_recipe, paths_in, recipe_in, recipe_text
from trtforge.core.recipe_text import commented, recipe_name
from trtforge.core.yaml_text import replaced


def copied_text(path: Path, file: Path) -> str:
    """The text of the recipe `path` for its copy `file`: named after `file`, with absolute paths.

    Raises ForgeError if the recipe is invalid, or if another value than these would change.
    """
    recipe = load_recipe(path)
    name = recipe_name(file.stem) or recipe.name
    values = paths_in(path)
    if name != recipe.name:
        values |= {("name",): name}
    text = replaced(recipe_text(path), values)
    command = commented(f"trtforge build {quote(operand(file))}")
    text = re.sub(rf"(?m)^# trtforge build {re.escape(recipe.name)}(?![\w.-])", lambda _: command, text)
    _require_same(text, recipe.model_copy(update={"name": name}), path)
    return text


def _require_same(text: str, recipe: Recipe, path: Path) -> None:
    """Raise ForgeError unless the text of a copy of `path` is this recipe, all paths written out."""
    try:
        found = recipe_in(text, path)
    except ForgeError as error:
        key = next((place.key for place in error.where if place.key is not None), "its text")
    else:
        changed = next(_differing(found.model_dump(), recipe.model_dump()), None)
        if changed is None:
            return
        key = ".".join(changed)
    raise ForgeError(
        f"{path} cannot be copied: {key} would be wrong in the copy",
        hint="If an alias (*NAME) gives the value, write the value in its place, then copy again.",
    )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The keys that lead to values that differ."""
    for key, value in one.items():
        against = other[key]
        if isinstance(value, Mapping) and isinstance(against, Mapping):
            yield from ((key, *rest) for rest in _differing(value, against))
        elif value != against:
            yield (key,)
