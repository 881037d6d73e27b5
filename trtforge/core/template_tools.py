"""Shows the tools of a chat to chat templates that need other forms of them than OpenAI's API allows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Any]
_DESCRIPTION = {"description": ""}
_NO_PARAMETERS = {"parameters": {"type": "object", "properties": {}}}
_ORDER = ("name", "description", "parameters")


def with_tools_in_system(messages: Sequence[Message], tools: Tools) -> Sequence[Message]:
    """Messages of which the first is a system message with the JSON of the tools' functions, unless it has tools."""
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]
    has_system = bool(messages) and messages[0].get("role") == "system"
    system, others = (messages[0], messages[1:]) if has_system else ({"role": "system", "content": ""}, messages)
    return [{"tools": json.dumps(functions, ensure_ascii=False), **system}, *others]


def with_description(tool: Any) -> Any:
    """A tool whose function has a description, an empty one if it had none."""
    function = _part(tool, "function")
    return tool if function is None else {**tool, "function": _filled(function, _DESCRIPTION)}


def filled_tools(tools: Tools) -> Iterator[Tools]:
    """For templates that fail for what tools lack: tools with more of it, if they lack it.

    First with empty descriptions and parameters of functions, then also with empty descriptions of parameters.
    """
    functions = [_with_function(tool) for tool in tools]
    if functions != list(tools):
        yield functions
    detailed = [_with_described_parameters(tool) for tool in functions]
    if detailed != functions:
        yield detailed


def _with_function(tool: Any) -> Any:
    """A tool whose function has a description and parameters, in the order in which templates write them."""
    function = _part(tool, "function")
    if function is None:
        return tool
    filled = _filled(function, _DESCRIPTION | _NO_PARAMETERS)
    if filled == function:
        return tool
    return {**tool, "function": {**{name: filled[name] for name in _ORDER if name in filled}, **filled}}


def _with_described_parameters(tool: Any) -> Any:
    function = _part(tool, "function")
    parameters = _part(function, "parameters")
    properties = _part(parameters, "properties")
    if function is None or parameters is None or properties is None:
        return tool
    described = {
        name: _filled(each, _DESCRIPTION) if isinstance(each, Mapping) else each for name, each in properties.items()
    }
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": described}}}


def _part(value: Any, name: str) -> Mapping[str, Any] | None:
    """The object of this name in an object, None if it has none."""
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _filled(given: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object with these values for what it lacks or what is null."""
    return {**given, **{name: value for name, value in values.items() if given.get(name) is None}}
