"""The command reference of docs/cli.md, read from the signatures of the typer app."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from trtforge.cli.app import app
from trtforge.machine.processes import SIGHUP_STATUS, SIGINT_STATUS, SIGTERM_STATUS

WIDTH = 120
_UNGROUPED = "Options"
_NAMES: dict[object, str] = {int: "whole number", float: "number", str: "text", Path: "path"}


def exit_statuses() -> str:
    """The meaning of each exit status of `trtforge.cli.app.main`, and what it means for individual commands."""
    rows = {
        0: "Done. `serve`: stopped by a signal, and no request was cut; or stopped before it was ready; with "
        "`--detach`: the server is ready.",
        1: "The work or a check failed: `error:` and `hint:` on stderr. `verify`, `build`: the gate failed. `plan`: "
        "the deployment is not legal, and no legal alternative was requested. `doctor`: a problem was found, or the "
        "log contains an error. `probe`: the check failed. `serve`: requests were cut, or the server failed. `status "
        "NAME`: that server is not ready. `stop`: requests were cut, or the server was killed.",
        2: "Wrong usage: an unknown command or option, an invalid value of an option, options that exclude each other. "
        "An invalid recipe or file gives status 1.",
        SIGINT_STATUS: "SIGINT (Ctrl-C): stderr says what was interrupted, what is kept and how to continue. `serve`: "
        "a second signal, which was SIGINT.",
        SIGTERM_STATUS: "SIGTERM: as for SIGINT. `serve`: a second signal, which was SIGTERM.",
        SIGHUP_STATUS: "SIGHUP, for example when the terminal is closed: as for SIGINT; ignored under `nohup`.",
    }
    return "\n".join(["| status | meaning |", "|---|---|", *(f"| {n} | {text} |" for n, text in rows.items())])


def commands_of_the_program() -> str:
    """Every command with its arguments and options, in the groups of `trtforge --help`."""
    panels: dict[str, list[str]] = {}
    for info in app.registered_commands:
        assert info.callback is not None
        assert info.name is not None
        panels.setdefault(_panel(info), []).append(_command(f"trtforge {info.name}", info.callback))
    for group in app.registered_groups:
        assert group.typer_instance is not None
        panels.setdefault(_panel(group), []).append(_group(f"trtforge {group.name}", group.typer_instance))
    return "\n\n".join(f"## {panel}\n\n" + "\n\n".join(parts) for panel, parts in panels.items())


def command_names() -> Iterator[str]:
    """The commands, subcommands with the name of their group."""
    for info in app.registered_commands:
        yield str(info.name)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from (f"{group.name} {info.name}" for info in group.typer_instance.registered_commands)


def _panel(info: Any) -> str:
    return info.rich_help_panel if isinstance(info.rich_help_panel, str) else _UNGROUPED


def _group(name: str, group: typer.Typer) -> str:
    parts = [f"### {name}", *_paragraphs(str(group.info.help))]
    for info in group.registered_commands:
        assert info.callback is not None
        parts.append(_command(f"{name} {info.name}", info.callback))
    return "\n\n".join(parts)


def _command(name: str, callback: Callable[..., Any]) -> str:
    hints = get_type_hints(callback, include_extras=True)
    groups: dict[str, list[str]] = {"Arguments": []}
    arguments = []
    for parameter in inspect.signature(callback).parameters.values():
        kind, *metadata = get_args(hints[parameter.name]) or (hints[parameter.name],)
        info = next((each for each in metadata if isinstance(each, ArgumentInfo | OptionInfo)), None)
        if info is None or info.hidden:  # typer.Context has none
            continue
        required = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            metavar = info.metavar or parameter.name.upper()
            arguments.append(_choices(metavar)[1] if required else f"[{metavar}]")
        group = "Arguments" if isinstance(info, ArgumentInfo) else _panel(info)
        groups.setdefault(group, []).append(_row(parameter.name, kind, info, parameter.default, required=required))
    groups[_UNGROUPED] = groups.pop(_UNGROUPED, [])  # last, as --help has it
    usage = f"`{' '.join([name, *arguments, '[OPTIONS]'])}`"
    head = "| {} | value | default | meaning |\n|---|---|---|---|\n"
    tables = [head.format(group) + "\n".join(rows) for group, rows in groups.items() if rows]
    return "\n\n".join([f"### {name}", usage, *_paragraphs(inspect.getdoc(callback) or ""), *tables])


def _row(name: str, kind: object, info: ArgumentInfo | OptionInfo, default: object, *, required: bool) -> str:
    many, kind = _element(kind)
    if isinstance(info, ArgumentInfo):
        word = f"`{_choices(info.metavar or name.upper())[1]}`"
    else:
        declared = "/".join(_declared(info)) or f"--{name.replace('_', '-')}"
        word = _coded(declared.split("/"))
    text = _plain(info.help or "")
    if many and "repeatable" not in text.lower():
        text += " Repeatable."
    cells = (word, _value(kind, info), _default(kind, info, default, required=required), text.strip())
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _declared(info: OptionInfo) -> list[str]:
    """The option's names as it is declared; typer keeps the first where it kept defaults once."""
    return [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str) and each[:1] == "-"]


def _element(kind: object) -> tuple[bool, object]:
    """Whether an option may be given several times, and the type of one value; None is no type."""
    many = False
    while True:
        inner = [each for each in get_args(kind) if each is not type(None)]
        if get_origin(kind) is Literal or len(inner) != 1:
            return many, kind
        many, kind = many or get_origin(kind) is list, inner[0]


def _value(kind: object, info: ArgumentInfo | OptionInfo) -> str:
    if kind is bool:
        return "–"
    if get_origin(kind) is Literal:
        return _coded([str(each) for each in get_args(kind)])
    low, high = info.min, info.max
    bounds = (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
    if isinstance(info, ArgumentInfo) and not _choices(info.metavar or "")[0]:
        return _NAMES[kind]
    return (_coded(info.metavar.split("|")) if info.metavar else _NAMES[kind]) + bounds


def _choices(metavar: str) -> tuple[bool, str]:
    """Whether a metavar lists choices, and the argument's name in a usage line: choices stand in parentheses."""
    several = "|" in metavar
    return several, f"({metavar})" if several else metavar


def _coded(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _default(kind: object, info: Any, default: object, *, required: bool) -> str:
    if required:
        return "required"
    if isinstance(info.show_default, str):
        return info.show_default if " " in info.show_default else f"`{info.show_default}`"
    if kind is bool:
        on, *off = "/".join(_declared(info)).split("/")
        return f"`{on if default else off[0]}`" if off else ("on" if default else "off")
    return "–" if default in (None, "") else f"`{default}`"


def _paragraphs(text: str) -> list[str]:
    """A docstring's paragraphs, its examples as one block of commands."""
    plain = [_plain(" ".join(part.split())) for part in re.split(r"\n\s*\n", text)]
    examples = [part.removeprefix("Example: ") for part in plain if part.startswith("Example: ")]
    prose = [textwrap.fill(part, WIDTH) for part in plain if not part.startswith("Example: ")]
    return [*prose, *(["```\n" + "\n".join(examples) + "\n```"] if examples else [])]


def _plain(text: str) -> str:
    """Help without rich's markup."""
    return re.sub(r"\[/?(?:dim|bold)\]", "", text).replace("\\[", "[")
