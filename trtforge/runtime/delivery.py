"""Delivers outputs to callbacks, whose errors must affect only their own request."""

import logging

from trtforge.engine_process.requests import OnOutput, Output

_LOG = logging.getLogger(__name__)


def deliver(on_output: OnOutput, output: Output) -> bool:
    """Call `on_output`; returns False if it raised."""
    try:
        on_output(output)
    except BaseException:  # SystemExit would end the thread of all requests, too
        _LOG.exception("the receiver of request %s failed", output.request_id)
        return False
    return True
