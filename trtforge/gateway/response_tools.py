"""The fields of /v1/responses for JSON output and function calls, converted to those of chat and of answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtforge.engine_process.requests import Guide
from trtforge.gateway.errors import bad_request
from trtforge.gateway.fields import Fields, wrong
from trtforge.gateway.tools import (
    ANY_OBJECT,
    CHOICES,
    Structure,
    allowed_of,
    check_functions,
    checked_name,
    guide_of,
    listed_tools,
    structure_of,
)

_FORMAT = "text.format"


@dataclass(frozen=True)
class Asked:
    """The structure, and the request's fields in the form in which answers repeat them."""

    structure: Structure
    shown: Mapping[str, object]


def read_asked(fields: Fields) -> Asked:
    """The requested structure. Raises ApiError."""
    guide, form = _format(fields)
    several = fields.flag("parallel_tool_calls", absent=True)
    tools = _tools(fields)
    allowed, choice, shown_choice = _choice(fields, tools)
    structure = structure_of(guide, _FORMAT, [_for_chat(tool) for tool in allowed], choice, several=several)
    shown = {
        "text": {"format": form, "verbosity": "medium"},
        "tools": tools,
        "tool_choice": shown_choice,
        "parallel_tool_calls": several,
    }
    return Asked(structure, shown)


def _format(fields: Fields) -> tuple[Guide | None, Mapping[str, object]]:
    """The guide of the text's format, and the format for answers."""
    text = Fields(fields.object("text"), ("format", "verbosity"), "text.")
    if text.get("verbosity") not in (None, "medium"):
        raise bad_request("text.verbosity is not supported by this server; say it in instructions", "text.verbosity")
    given = text.object("format")
    kind = given.get("type", "text")
    if kind == "text":
        return None, {"type": kind}
    if kind == "json_object":
        return ANY_OBJECT, {"type": kind}
    if kind != "json_schema":
        raise bad_request(f"{_FORMAT}.type must be text, json_object or json_schema", f"{_FORMAT}.type")
    name, schema = checked_name(given.get("name"), f"{_FORMAT}.name"), given.get("schema")
    if not isinstance(schema, dict):
        raise wrong(f"{_FORMAT}.schema", "an object", schema)
    described = _described(given, _FORMAT)
    shown = {"type": kind, "name": name, "schema": schema, **described, "strict": described["strict"] or False}
    return guide_of(schema), shown


def _tools(fields: Fields) -> list[Mapping[str, Any]]:
    """The functions, in the form for answers."""
    tools = {f"tools[{number}]": tool for number, tool in enumerate(listed_tools(fields))}
    for where, tool in tools.items():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            shown = kind[:40] if isinstance(kind, str) else "missing"
            message = f"{where}: tools of type {shown!r} are not supported, this server takes those of type function"
            raise bad_request(message, where)
        if "name" not in tool and isinstance(tool.get("function"), dict):
            message = f"{where} has the form of chat/completions; name and parameters belong into the tool itself"
            raise bad_request(message, where)
    check_functions(tools)
    return [
        {"type": "function", "name": tool["name"], "parameters": tool.get("parameters"), **_described(tool, where)}
        for where, tool in tools.items()
    ]


def _described(given: Mapping[str, Any], where: str) -> Mapping[str, object]:
    description, strict = given.get("description"), given.get("strict")
    if description is not None and not isinstance(description, str):
        raise wrong(f"{where}.description", "a string", description)
    if strict is not None and not isinstance(strict, bool):
        raise wrong(f"{where}.strict", "true or false", strict)
    return {"description": description, "strict": strict}


def _for_chat(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = {name: tool[name] for name in ("name", "description", "parameters") if tool[name] is not None}
    kept |= {"strict": True} if tool["strict"] else {}
    return {"type": "function", "function": kept}


def _choice(
    fields: Fields, tools: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Mapping[str, Any]], object, str | Mapping[str, object]]:
    """The tools that may be called, the choice in the form of chat, and the choice for answers."""
    match fields.get("tool_choice"):
        case None:
            return tools, None, "auto"
        case str(choice):
            return tools, choice, choice
        case {"type": "function", "name": str(name)}:
            chosen = {"type": "function", "function": {"name": name}}
            return tools, chosen, {"type": "function", "name": name}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(listed)}:
            names = [each.get("name") if isinstance(each, dict) else None for each in listed]
            allowed = allowed_of(tools, [tool["name"] for tool in tools], names, "tool_choice")
            return allowed, mode, {"type": "allowed_tools", "mode": mode, "tools": listed}
    raise bad_request(f"tool_choice must be {CHOICES}", "tool_choice")
