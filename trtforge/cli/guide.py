"""The options of guided decoding: what an answer must be."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli.options import SAMPLING
from trtforge.core.errors import UsageError

if TYPE_CHECKING:
    from trtforge.engine_process.requests import Guide

JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        rich_help_panel=SAMPLING,
        help="The answer is JSON that follows the schema in this file.",
        show_default=False,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        "--regex",
        metavar="EXPRESSION",
        rich_help_panel=SAMPLING,
        help="The answer matches this regular expression.",
        show_default=False,
    ),
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        "--grammar",
        metavar="FILE",
        rich_help_panel=SAMPLING,
        help="The answer follows the EBNF grammar in this file, whose first rule is root.",
        show_default=False,
    ),
]
_HINT = "Correct the file that the option names."
_ABSENT = "The option takes the name of a file that holds it."


def guide_of(json_schema: Path | None, regex: str | None, grammar: Path | None) -> "Guide | None":
    """The guide that the options give. Raises UsageError for two of them, ForgeError for a file that cannot be read."""
    from trtforge.core.json_text import read_json
    from trtforge.engine_process.requests import Guide

    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{names[0]} with {names[1]}: an answer follows one of them", hint="Give one of them.")
    if json_schema is not None:
        read_json(json_schema, hint=_HINT, absent=_ABSENT)  # names the line that is wrong
        return Guide("json_schema", _text(json_schema))
    if grammar is not None:
        return Guide("ebnf_grammar", _text(grammar))
    return None if regex is None else Guide("regex", regex)


def _text(path: Path) -> str:
    from trtforge.core.reading import MIB, as_text, read_limited

    return as_text(read_limited(path, MIB, hint=_HINT, absent=_ABSENT), str(path), hint=_HINT)
