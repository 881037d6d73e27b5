"""The layout of `--help`: plain text that fits 80 columns, options and commands grouped by their `rich_help_panel`.

Plain, because typer's rich layout cuts long option names at 80 columns and takes longer to import than to show.
"""

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Contexts and formatters are click's in some releases of typer and typer's own in others: hence Any.
_Sections = dict[str, list[tuple[str, str]]]
_WIDEST_NAME = 30
_WHOLE_SENTENCE = 200
_BOUNDS = re.compile(r"(?:([\d.e+]+)<=)?x(?:([<>]=)([\d.e+]+))?")
_EXTRA = re.compile(r"\[([^\]]*)\]$")


class Command(TyperCommand):
    """A command: its arguments, then its options by group, those without a group last."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The parts of the usage line, without the braces that newer releases of typer put around arguments."""
        return [re.sub(r"[{}]", "", piece).replace("......", "...") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections."""
        _write(formatter, _parameters(self.get_params(ctx), ctx))


class Group(TyperGroup):
    """A program or a group of commands: its commands by group, then its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections."""
        commands: _Sections = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            title = getattr(command, "rich_help_panel", None) or "Commands"
            commands.setdefault(title, []).append((name, command.get_short_help_str(_WHOLE_SENTENCE)))
        _write(formatter, commands)
        _write(formatter, _parameters(self.get_params(ctx), ctx))


def _parameters(parameters: Iterable[Any], ctx: Any) -> _Sections:
    arguments: _Sections = {}
    groups: _Sections = {}
    options: _Sections = {}
    for parameter in parameters:
        line = parameter.get_help_record(ctx)
        group = getattr(parameter, "rich_help_panel", None)
        if line is None:
            continue
        line = (line[0], _in_words(line[1]))
        if parameter.param_type_name == "argument":
            arguments.setdefault("Arguments", []).append((parameter.metavar or line[0], line[1]))
        elif group is not None:
            groups.setdefault(group, []).append(line)
        else:
            options.setdefault("Options", []).append(line)
    return arguments | groups | options


def _in_words(text: str) -> str:
    """A help text with words for the symbols of a `[default: (8); x>=1]` at its end."""
    return _EXTRA.sub(lambda extra: f"[{'; '.join(_said(part) for part in extra[1].split('; '))}]", text)


def _said(part: str) -> str:
    default = re.fullmatch(r"default: \((.*)\)", part)
    if default is not None:
        return f"default: {default[1]}"
    bounds = _BOUNDS.fullmatch(part)
    if bounds is None:
        return part
    low, sign, bound = bounds.groups()
    if low is not None:
        return f"from {low} to {bound}"
    return f"at least {bound}" if sign == ">=" else f"at most {bound}"


def _write(formatter: Any, sections: _Sections) -> None:
    """Write each section as a list of definitions, all with the same width of the first column."""
    names = [name for lines in sections.values() for name, _ in lines if len(name) <= _WIDEST_NAME]
    width = max(map(len, names), default=0)
    for title, lines in sections.items():
        with formatter.section(title):
            formatter.write_dl([(name.ljust(width), text) for name, text in lines], col_max=width)
