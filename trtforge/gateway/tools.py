"""Converts the fields of a chat for JSON output and function calls to the guide of the answer."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from trtforge.core.json_schema import VALUES, arguments_schema
from trtforge.engine_process.requests import Guide
from trtforge.gateway.argument_types import ArgumentTypes
from trtforge.gateway.errors import ApiError, bad_request
from trtforge.gateway.fields import Fields, wrong

ANY_OBJECT = Guide("json_schema", '{"type": "object"}')
_MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_CHOICE = "tool_choice"
CHOICES = "none, auto, required, an object that names a function, or one of type allowed_tools"
_UNGUIDED = "guided decoding is not available for this engine"


@dataclass(frozen=True)
class ToolUse:
    """How an answer calls functions.

    `mode`: auto: the model may call, in the format of its chat template; required: the answer is an array of calls;
    named: the answer is the arguments of the one function. `several`: more than one call is allowed. `schemas`: of the
    arguments, by the function's name.
    """

    mode: Literal["auto", "required", "named"]
    names: Sequence[str]
    several: bool = True
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def types(self) -> Mapping[str, ArgumentTypes]:
        """The types of the arguments, by the function's name."""
        return {name: ArgumentTypes(self.schemas.get(name, {})) for name in self.names}


@dataclass(frozen=True)
class Structure:
    """The requested form of an answer. `field`: the request's field that needs a guide; `tools`: for the template.

    With `use` in mode auto, the guide applies to answers without calls.
    """

    guide: Guide | None = None
    field: str = ""
    use: ToolUse | None = None
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def guide_allows_calls(self) -> bool:
        """Whether the model may call functions instead of following the guide."""
        return self.guide is not None and self.use is not None and self.use.mode == "auto"

    def unguided(self) -> ApiError:
        """The error for a model without guided decoding."""
        allowed = "auto or none" if self.field == _CHOICE else "text"
        return bad_request(f"{_UNGUIDED}, so {self.field} can only be {allowed}", self.field)


def read_structure(fields: Fields) -> Structure:
    """The structure requested by a chat. Raises ApiError."""
    for name, choice_name in (("functions", "function_call"),):
        if fields.get(name) or fields.get(choice_name) not in (None, "none", "auto"):
            where = name if fields.get(name) else choice_name
            raise bad_request(f"{where} is not supported; send tools and tool_choice", where)
    several = fields.flag("parallel_tool_calls", absent=True)
    tools, choice = _allowed(_tools(fields), fields.get(_CHOICE))
    return structure_of(_response_format(fields), "response_format", tools, choice, several=several)


def structure_of(
    guide: Guide | None, field: str, tools: Sequence[Mapping[str, Any]], choice: object, *, several: bool
) -> Structure:
    """The structure for a guide, requested by `field`, and for tools and their choice in the form of chat.

    If the choice forces a call, the guide does not apply. `several`: more than one call is allowed. Raises ApiError.
    """
    used, use = _use(tools, choice, several=several)
    if use is None or use.mode == "auto":
        return Structure(guide, field if guide else "", use, used)
    schema = _arguments(used[0]) if use.mode == "named" else _calls(used, several=use.several)
    return Structure(guide_of(schema), _CHOICE, use, used)


def guide_of(schema: Mapping[str, Any]) -> Guide:
    """The guide of a JSON schema."""
    return Guide("json_schema", json.dumps(schema, ensure_ascii=False))


def listed_tools(fields: Fields) -> Sequence[Any]:
    """The array of tools, whose items are not checked; empty if absent. Raises ApiError."""
    given = fields.get("tools")
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > _MOST_TOOLS:
        raise wrong("tools", f"an array of at most {_MOST_TOOLS} tools", given)
    return given


def check_functions(functions: Mapping[str, Mapping[str, Any]]) -> None:
    """Check names and parameters of functions, by their paths in the request. Raises ApiError."""
    names = set()
    for where, function in functions.items():
        name, parameters = checked_name(function.get("name"), f"{where}.name"), function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise wrong(f"{where}.parameters", "an object", parameters)
        if not isinstance(function.get("strict", False), bool | None):
            raise wrong(f"{where}.strict", "true or false", function["strict"])
        if name in names:
            raise bad_request(f"tools has two functions named {name}", f"{where}.name")
        names.add(name)


def checked_name(name: object, where: str) -> str:
    """The name of a function or a format. Raises ApiError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(f"{where} must be 1 to 64 letters, digits, _ or -", where)
    return name


def _response_format(fields: Fields) -> Guide | None:
    given = fields.object("response_format")
    match given.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            described = given.get("json_schema")
            if not isinstance(described, dict):
                raise wrong("response_format.json_schema", "an object", described)
            schema = described.get("schema")
            if not isinstance(schema, dict):
                raise wrong("response_format.json_schema.schema", "an object", schema)
            return guide_of(schema)
    raise bad_request("response_format.type must be text, json_object or json_schema", "response_format")


def _tools(fields: Fields) -> Sequence[Mapping[str, Any]]:
    if fields.get(_CHOICE) == "none":
        return ()
    tools = listed_tools(fields)
    functions = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise bad_request(f"{where} must be an object of type function with a function", where)
        functions[f"{where}.function"] = tool["function"]
    check_functions(functions)
    return tools


def _allowed(tools: Sequence[Mapping[str, Any]], choice: object) -> tuple[Sequence[Mapping[str, Any]], object]:
    """The tools that may be called and the mode, if the choice lists allowed tools."""
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)}}:
            functions = [each.get("function") if isinstance(each, dict) else None for each in listed]
            names = [each.get("name") if isinstance(each, dict) else None for each in functions]
            return allowed_of(
                tools, [tool["function"]["name"] for tool in tools], names, f"{_CHOICE}.allowed_tools"
            ), mode
    return tools, choice


def allowed_of(
    tools: Sequence[Mapping[str, Any]], known: Sequence[str], names: Sequence[object], where: str
) -> Sequence[Mapping[str, Any]]:
    """The tools whose names are in `names`; `known`: the names of all. Raises ApiError."""
    if not names or any(name not in known for name in names):
        raise bad_request(f"{where}.tools must name functions that are in tools", _CHOICE)
    return [tool for tool, name in zip(tools, known, strict=True) if name in names]


def _use(
    tools: Sequence[Mapping[str, Any]], choice: object, *, several: bool
) -> tuple[Sequence[Mapping[str, Any]], ToolUse | None]:
    """The tools that may be called, and how the answer uses them."""
    names = [tool["function"]["name"] for tool in tools]
    if choice == "none" or (not tools and choice in (None, "auto")):
        return (), None
    if not tools:
        raise bad_request(f"{_CHOICE} is only allowed when tools are given", _CHOICE)
    if choice in (None, "auto"):
        schemas = {tool["function"]["name"]: _arguments(tool) for tool in tools}
        return tools, ToolUse("auto", names, several, schemas)
    if choice == "required":
        return tools, ToolUse("required", names, several)
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(choice.get("function"), dict):
        raise bad_request(f"{_CHOICE} must be {CHOICES}", _CHOICE)
    name = choice["function"].get("name")
    if name not in names:
        raise bad_request(f"{_CHOICE} names a function that is not in tools", _CHOICE)
    return [tools[names.index(name)]], ToolUse("named", (name,), several=False)


def _arguments(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return arguments_schema(tool["function"].get("parameters"))


def _calls(tools: Sequence[Mapping[str, Any]], *, several: bool) -> Mapping[str, Any]:
    """The schema of an array of calls. Each function's arguments schema is a definition, to which calls refer."""
    definitions, calls = {}, []
    for tool in tools:
        name = tool["function"]["name"]
        place = f"#/$defs/{name}"
        definitions[name] = _moved(_arguments(tool), place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = {} if several else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": definitions}


def _moved(schema: Any, place: str, *, named: bool = False) -> Any:
    """A schema moved from the root to `place`, with its references. `named`: its keys are names of schemas, not
    keywords."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: value if key in VALUES and not named else _moved(value, place, named=key in _NAMED and not named)
        for key, value in schema.items()
    }
    reference = schema.get("$ref")
    if not named and isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        made["$ref"] = place + reference[1:]
    return made
