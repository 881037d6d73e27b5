"""Tries a chat template in a process of its own before it is packaged."""

import json
import logging
import signal
import subprocess

from trtforge.core.errors import ForgeError, first_line
from trtforge.core.interpreter import module_arguments, python_environment, python_interpreter
from trtforge.formats.chat_template import ChatTemplate
from trtforge.machine.own_limits import NO_MEMORY
from trtforge.package.template_main import MOST_MEMORY, MOST_SECONDS

_PROGRAM = "trtforge.package.template_main"
_LOG = logging.getLogger(__name__)


def template_problem(chat: ChatTemplate) -> str | None:
    """Why served models could not use a template; None if they can, and, with a warning, if it cannot be tried."""
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
    except (OSError, ForgeError) as error:
        _LOG.warning(f"the chat template is packaged untried: {first_line(error)}")
        return None
    match done.returncode:
        case 0:
            return done.stdout or None
        case status if status == -signal.SIGXCPU:
            return f"it takes more than {MOST_SECONDS} s of CPU time for a short conversation"
        case status if status == NO_MEMORY:
            return f"it takes more than {MOST_MEMORY >> 30} GiB of memory for a short conversation"
        case status if status < 0:
            return f"it ended the process that tried it with signal {-status}"
    reason = next(reversed(done.stderr.splitlines()), f"status {done.returncode}")
    _LOG.warning(f"the chat template is packaged untried: {reason}")
    return None
