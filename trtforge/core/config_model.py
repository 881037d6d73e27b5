"""The base of every configuration model, and its validation errors as messages for users."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, ValidationInfo, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import Self

from trtforge.core.config_schema import add_limits
from trtforge.core.errors import ForgeError, Repair, UsageError, Where
from trtforge.core.nearest import nearest_name
from trtforge.core.plausible import LARGEST
from trtforge.core.yaml_text import parse_yaml

Location = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""
LineOf = Callable[[Location], int | None]
GivenBy = Callable[[Location], str | None]
"""Returns the command-line option that gave a value; None for a value of the file."""

_ADDED = re.compile(r"int|float|bool|str|none|(?:function|constrained|nullable|literal|list|tuple|dict|union|lax)\b.*")
"""Parts of a location that pydantic adds for the members of a union and for validators."""
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%", re.ASCII)
_SHOWN = 60  # characters of a value in a message
_LISTED = 20  # mistakes in a message
_SAID = {
    "model_type": "Input should be keys with values",
    "tuple_type": "Input should be a list",
}
"""Replacements of pydantic's messages about Python's types, in YAML's terms."""


class Config(BaseModel):
    """A frozen configuration: unknown keys are errors; defaults and descriptions are part of the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false for numbers, which Python accepts as 1 and 0."""
        types = _types_at(cls, info.field_name or "")
        if isinstance(value, bool) and bool not in types and not {int, float}.isdisjoint(types):
            raise ValueError("Input should be a number")
        return value

    @field_validator("*")
    @classmethod
    def _plausible(cls, value: object, info: ValidationInfo) -> object:
        """Refuse implausibly large values early, as the readers of engines and models refuse them too."""
        limit = LARGEST.get(info.field_name or "")
        if limit is not None and isinstance(value, int) and value > limit:
            raise ValueError(f"Input should be less than or equal to {limit}")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema, with the limits of `_plausible`."""
        schema = handler(core_schema)
        add_limits(handler.resolve_ref_schema(schema))
        return schema

    @classmethod
    def parse(
        cls,
        values: Mapping[str, Any],
        where: str,
        name: Callable[[str], str] = str,
        line: LineOf | None = None,
        given: GivenBy | None = None,
    ) -> Self:
        """Validate `values`. Raises ForgeError naming `where` and the wrong keys, for an unknown one the nearest.

        Many mistakes are counted, and the first in the order of their lines are named.

        `name` maps a dotted key to the name that messages use; `line` returns the line of a value in the file `where`,
        `given` the option that gave it instead. Raises UsageError if only options are wrong.
        """
        if not isinstance(values, Mapping):
            raise ForgeError(f"{where}: {values!r:.60} is not a mapping", hint="Give keys with values.")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            problems = _problems(cls, error)
            placed = [(_Place.of(location, line, given), location) for location in problems]
            placed.sort(key=lambda pair: pair[0].line or 0)
            first = [(place, _mistake(cls, problems[at], at, name)) for place, at in placed[:_LISTED]]
            only_options = all(place.option is not None for place, _ in placed)
            raise _as_forge_error(first, len(placed), where, UsageError if only_options else ForgeError) from None


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
    return str in _types_at(cls, key)


def holds_none(cls: type[BaseModel], key: str) -> bool:
    """Whether the field at a dotted key can be unset and takes no text: `none` then means null."""
    types = _types_at(cls, key)
    return type(None) in types and not any(kind is str or "none" in get_args(kind) for kind in types)


@cache
def _types_at(cls: type[BaseModel], key: str) -> tuple[Any, ...]:
    *parents, last = key.split(".")
    current = _model_at(cls, parents)
    field = current.model_fields.get(last) if current else None
    return () if field is None else (field.annotation, *get_args(field.annotation))


@dataclass(frozen=True)
class _Mistake:
    location: Location
    message: str
    hint: str
    repair: Repair | None = None


@dataclass(frozen=True)
class _Place:
    """The source of a wrong value: an option or a line of the file."""

    option: str | None
    line: int | None

    @classmethod
    def of(cls, location: Location, line: LineOf | None, given: GivenBy | None) -> "_Place":
        option = given(location) if given is not None else None
        return cls(option, line(location) if line is not None and option is None else None)

    @property
    def label(self) -> str:
        """The prefix of a message if there are several mistakes."""
        return f"{self.option}: " if self.option else "" if self.line is None else f"line {self.line}: "

    def named(self, where: str) -> str:
        """The prefix of the message if there is one mistake."""
        return self.option or where + ("" if self.line is None else f", line {self.line}")

    def said(self, mistake: _Mistake) -> str:
        """The message, without the key if the option names it."""
        key, _, rest = mistake.message.partition(": ")
        return rest if f" {key}=" in (self.option or "") else mistake.message


def _as_forge_error(
    listed: Sequence[tuple[_Place, _Mistake]], count: int, where: str, kind: type[ForgeError]
) -> ForgeError:
    """One error for `count` mistakes, of which the first are listed."""
    places = [
        Where(where, place.line, ".".join(map(str, mistake.location)) or None)
        for place, mistake in listed
        if place.option is None
    ]
    if count == 1:
        ((only, mistake),) = listed
        error = kind(f"{only.named(where)}: {only.said(mistake)}", hint=mistake.hint)
        return error.at(*places).repaired_by(mistake.repair)
    said = "".join(f"\n  {place.label}{place.said(mistake)}" for place, mistake in listed)
    hints = "".join(f"\n  {place.label}{mistake.hint}" for place, mistake in listed)
    correct = "Correct each of them"
    if more := count - len(listed):
        said += f"\n  and {more:,} more {'mistake' if more == 1 else 'mistakes'}"
        correct = "Correct these first"
    title = f"{'the command line' if kind is UsageError else where}: {count:,} mistakes"
    return kind(f"{title}{said}", hint=f"{correct}:{hints}").at(*places)


def _problems(cls: type[BaseModel], error: ValidationError) -> dict[Location, Mapping[str, Any]]:
    """One of pydantic's errors per wrong key: the first if there are several."""
    found: dict[Location, Mapping[str, Any]] = {}
    for problem in error.errors(include_url=False):
        found.setdefault(_in_values(cls, problem["loc"]), problem)
    return found


def _in_values(cls: type[BaseModel], location: Location) -> Location:
    """A location without the names of validators and types that pydantic appends for values that are not models."""
    for count, part in enumerate(location):
        known = _model_at(cls, [str(before) for before in location[:count]])
        if known is None and count and isinstance(part, str) and _ADDED.fullmatch(part):
            return location[:count]
    return location


def _mistake(
    cls: type[BaseModel], problem: Mapping[str, Any], location: Location, name: Callable[[str], str]
) -> _Mistake:
    path = [str(part) for part in location]
    key = name(".".join(path)) if path else ""
    known = list(_fields_at(cls, path[:-1]))
    if problem["type"] == "extra_forbidden":
        nearest = nearest_name(path[-1], known)
        meant = name(".".join([*path[:-1], nearest])) if nearest else ""
        hint = f"Did you mean {meant}?" if nearest else "Remove it."
        repair = Repair(key, meant) if nearest else None
        return _Mistake(location, f"unknown key {key}", f"{hint} Keys here: {', '.join(known)}.", repair)
    if problem["type"] == "missing":
        return _Mistake(location, f"{key} is missing", f"Add {key}.")
    said = _SAID.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    hint, repair = f"Got {_as_written(problem.get('input'))}; correct {key or 'it'}.", None
    if problem["type"] in _SAID:
        fields = _fields_at(cls, path)
        give = (
            f"give keys with values: {', '.join(fields)}" if fields else "write [FIRST, SECOND], or one a line after -"
        )
        hint = f"Got {_as_written(problem['input'])}; {give}."
    if problem["type"] == "string_pattern_mismatch" and (parent := _model_at(cls, path[:-1])):
        hint = f"Got {problem['input']!r}. {parent.model_fields[path[-1]].description}"
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        words = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        near = get_close_matches(problem["input"].lower(), words, n=1)
        if near:
            hint, repair = f"Got {problem['input']!r}; did you mean {near[0]}?", Repair(problem["input"], near[0])
    given = problem.get("input")
    if problem["type"] == "float_parsing" and isinstance(given, str) and (share := _PERCENT.fullmatch(given)):
        meant = f"{float(share[1]) / 100:g}"
        hint, repair = f"Got {given!r}; did you mean {meant}?", Repair(given, meant)
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
        kind = "" if isinstance(problem["input"], bool) else "the number "
        hint = f"Got {kind}{_as_written(problem['input'])}: put it in quotes to make it text."
    return _Mistake(location, f"{key or 'value'}: {said}", hint, repair)


def _as_written(value: object) -> str:
    """A wrong value in YAML's notation, where it differs from Python's."""
    if value is None:
        return "no value"
    return str(value).lower() if isinstance(value, bool) else repr(value)


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
