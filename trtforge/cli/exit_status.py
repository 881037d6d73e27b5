"""The exit statuses of the program, and which error ends it with which."""

from trtforge.core.errors import UsageError
from trtforge.machine.processes import SIGHUP_STATUS, SIGINT_STATUS, SIGTERM_STATUS

DONE = 0
FAILED = 1
"""The work failed, or a check did not hold."""
WRONG_USAGE = 2
"""The command line is wrong: nothing was done."""
INTERRUPTED = SIGINT_STATUS
"""Ctrl-C (SIGINT)."""
TERMINATED = SIGTERM_STATUS
"""SIGTERM."""
HUNG_UP = SIGHUP_STATUS
"""SIGHUP, as when the terminal is closed."""


def status_of(error: Exception) -> int:
    """The status for an error that ends the program."""
    return WRONG_USAGE if isinstance(error, UsageError) else FAILED
