"""Tries a chat template in a process of its own before it is packaged."""

import functools
import json
import signal
import subprocess

from trtforge.core.interpreter import module_arguments, python_environment, python_interpreter
from trtforge.formats.chat_template import ChatTemplate
from trtforge.machine.own_limits import NO_MEMORY
from trtforge.package.template_main import MOST_MEMORY, MOST_SECONDS

_PROGRAM = "trtforge.package.template_main"


def template_problem(chat: ChatTemplate) -> str | None:
    """Why served models could not use a template; None if they can."""
    return _tried(json.dumps(chat.as_json()))


@functools.cache
def _tried(values: str) -> str | None:
    command = [python_interpreter(), *module_arguments(_PROGRAM)]
    done = subprocess.run(
        command, input=values, env=python_environment(), capture_output=True, text=True, encoding="utf-8", check=False
    )
    match done.returncode:
        case 0:
            return done.stdout or None
        case status if status == -signal.SIGXCPU:
            return f"it takes more than {MOST_SECONDS} s of CPU time for a short conversation"
        case status if status == NO_MEMORY:
            return f"it takes more than {MOST_MEMORY >> 30} GiB of memory for a short conversation"
        case status:
            return f"the process that tried it ended with status {status}"
