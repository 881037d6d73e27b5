"""Tries a chat template in a process of its own before it is packaged."""

import json
import logging
import signal
import subprocess
from dataclasses import dataclass
from typing import Any

from trtforge.core.errors import ForgeError, first_line
from trtforge.core.interpreter import module_arguments, python_environment, python_interpreter
from trtforge.core.json_text import parse_json
from trtforge.formats.chat_template import ChatTemplate
from trtforge.machine.own_limits import NO_MEMORY
from trtforge.package.template_main import MOST_MEMORY, MOST_SECONDS

_PROGRAM = "trtforge.package.template_main"
_LOG = logging.getLogger(__name__)
_SHOWS_NO_TOOLS = (
    "shows the model no tools: functions of a request have no effect unless tool_choice forces a call, of which the "
    "model knows no description. For calls, package a tokenizer whose chat template shows tools, or describe the "
    "functions in the messages"
)
_SHOWS_UNKNOWN_CALLS = (
    "shows tools, but calls in a format that is not known: the gateway returns such calls as text, unless "
    "tool_choice forces them. For calls, package a tokenizer whose chat template shows one of the formats in "
    "docs/deployment.md, or read the text in the client"
)


@dataclass(frozen=True)
class Tried:
    """What trying a template showed. `problem`: why served models could not use it.

    `lacks`: what it does not show of tools and calls, as the rest of a sentence.
    """

    problem: str | None = None
    lacks: str | None = None


def try_template(chat: ChatTemplate) -> Tried:
    """Try a template. Warns if it cannot be tried, and takes it for usable then."""
    try:
        done = subprocess.run(
            [python_interpreter(), *module_arguments(_PROGRAM)],
            input=json.dumps(chat.as_json()),
            env=python_environment(),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode == 0:
            return _tried(parse_json(done.stdout, _PROGRAM, hint=""))
    except (OSError, ForgeError) as error:
        _LOG.warning(f"the chat template is packaged untried: {first_line(error)}")
        return Tried()
    match done.returncode:
        case status if status == -signal.SIGXCPU:
            return Tried(f"it takes more than {MOST_SECONDS} s of CPU time for a short conversation")
        case status if status == NO_MEMORY:
            return Tried(f"it takes more than {MOST_MEMORY >> 30} GiB of memory for a short conversation")
        case status if status < 0:
            return Tried(f"it ended the process that tried it with signal {-status}")
    reason = next(reversed(done.stderr.splitlines()), f"status {done.returncode}")
    _LOG.warning(f"the chat template is packaged untried: {reason}")
    return Tried()


def _tried(found: Any) -> Tried:
    """What the process wrote. Raises ForgeError if it is something else."""
    if not isinstance(found, dict) or not found.keys() >= {"problem", "shows_tools", "shows_unknown_calls"}:
        raise ForgeError(f"{_PROGRAM}: its output is not what it writes", hint="")
    if found["problem"] is not None:
        return Tried(found["problem"])
    if not found["shows_tools"]:
        return Tried(lacks=_SHOWS_NO_TOOLS)
    return Tried(lacks=_SHOWS_UNKNOWN_CALLS if found["shows_unknown_calls"] else None)
