"""Paths in recipes: where a relative one starts, and recipes with other paths in their place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtforge.core.config_model import Location

_NAMED = ("builtin:", "hf:")
"""Beginnings of data that is not in files."""
_MODELS = ("source", "model")
"""Keys of models, which may be hub ids."""


def path_in_file(location: Location, source: str, base: Path) -> str:
    """A source that a file in `base` gives at `location`, as an absolute path.

    Names that begin with `builtin:` or `hf:` are unchanged, and models that are not in `base`, which may be hub ids.
    """
    found = path_of_option(source, base)
    stays = found != source or source.startswith(_NAMED) or location[-1] in _MODELS
    return found if stays else str((base / source).absolute())


def path_of_option(source: str, base: Path) -> str:
    """A source that an option gives: in `base` if it exists there, else in the current directory, or a hub id."""
    path = base / source
    return str(path.resolve()) if path.exists() else source


def changed(value: Any, changes: Mapping[Location, str]) -> Any:
    """A configuration, or a part of it, with these texts at these keys and indexes."""
    if not changes:
        return value
    if () in changes:
        return changes[()]
    inner: dict[str | int, dict[Location, str]] = {}
    for (first, *rest), text in changes.items():
        inner.setdefault(first, {})[tuple(rest)] = text
    if isinstance(value, tuple):
        return tuple(changed(each, inner.get(number, {})) for number, each in enumerate(value))
    return value.model_copy(update={str(key): changed(getattr(value, str(key)), at) for key, at in inner.items()})
