"""The error that an engine's requests get when a step fails."""

import logging

from trtforge.core.errors import ForgeError
from trtforge.core.memory_errors import out_of_memory

_LOG = logging.getLogger(__name__)


def failure_of(error: Exception) -> ForgeError:
    """The error for requests of an engine in which `error` was raised. Logs the traceback of an unexpected one."""
    if isinstance(error, ForgeError):
        return error
    _LOG.error("the engine failed", exc_info=error)
    hint = "Load it again; the traceback is in its log."
    return out_of_memory(error) or ForgeError(f"the engine failed: {error!r}", hint=hint)
