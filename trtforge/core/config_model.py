"""The base of every configuration model, and its validation errors as messages for users."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.yaml_text import parse_yaml

_SHOWN = 60  # characters of a value in a message


class Config(BaseModel):
    """A frozen configuration: unknown keys are errors; defaults and descriptions are part of the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str, name: Callable[[str], str] = str) -> Self:
        """Validate `values`. Raises ForgeError naming `where`, the dotted key and, for an unknown key, the nearest.

        `name` maps a dotted key to the name that messages use.
        """
        if not isinstance(values, Mapping):
            raise ForgeError(f"{where}: {values!r:.60} is not a mapping", hint="Give keys with values.")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise _as_forge_error(cls, error, where, name) from None


def parse_value(text: str, option: str) -> Any:
    """The value of an option, written as YAML. Raises UsageError naming the option."""
    try:
        return parse_yaml(text, option, "")
    except ForgeError as error:
        raise UsageError(
            f"{option}: {text[:_SHOWN]!r} is not a value ({error.message})",
            hint="Write the value as YAML: 3, 0.5, true, text.",
        ) from None


def holds_text(cls: type[BaseModel], key: str) -> bool:
    """Whether the field at a dotted key takes text: 0.20 is then a release, not a number."""
    *parents, last = key.split(".")
    current = _model_at(cls, parents)
    field = current.model_fields.get(last) if current else None
    return field is not None and str in (field.annotation, *get_args(field.annotation))


def _as_forge_error(cls: type[BaseModel], error: ValidationError, where: str, name: Callable[[str], str]) -> ForgeError:
    problem = error.errors()[0]
    location = [str(part) for part in problem["loc"]]
    key = name(".".join(location)) if location else ""
    known = list(_fields_at(cls, location[:-1]))
    if problem["type"] == "extra_forbidden":
        nearest = get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"Did you mean {name('.'.join([*location[:-1], nearest[0]]))}?" if nearest else "Remove it."
        return ForgeError(f"{where}: unknown key {key}", hint=f"{hint} Keys here: {', '.join(known)}.")
    if problem["type"] == "missing":
        return ForgeError(f"{where}: {key} is missing", hint=f"Add {key}.")
    said = problem["msg"].removeprefix("Value error, ")
    hint = f"Got {problem.get('input')!r}; correct {key or 'it'}."
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        meant = get_close_matches(problem["input"], re.findall(r"'([^']*)'", problem["ctx"]["expected"]), n=1)
        hint = f"Got {problem['input']!r}; did you mean {meant[0]}?" if meant else hint
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
        hint = f"Got the number {problem['input']}: put it in quotes to make it text."
    return ForgeError(f"{where}: {key or 'value'}: {said}", hint=hint)


def _fields_at(cls: type[BaseModel], path: list[str]) -> tuple[str, ...]:
    """The field names of the model nested at `path`."""
    found = _model_at(cls, path)
    return tuple(found.model_fields) if found else ()


def _model_at(cls: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    current: type[BaseModel] = cls
    for part in path:
        field = current.model_fields.get(part)
        nested = [a for a in (field.annotation, *get_args(field.annotation)) if _is_model(a)] if field else []
        if not nested:
            return None
        current = nested[0]
    return current


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
