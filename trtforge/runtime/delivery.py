"""Outputs go to callbacks, which must affect only their own request."""

import logging

from trtforge.engine_process.requests import OnOutput, Output

_LOG = logging.getLogger(__name__)


def deliver(on_output: OnOutput, output: Output) -> bool:
    """Call `on_output`; returns False if it raised, which must affect only its own request."""
    try:
        on_output(output)
    except BaseException:  # SystemExit, too, would end the thread of all requests
        _LOG.exception("the receiver of request %s failed", output.request_id)
        return False
    return True
