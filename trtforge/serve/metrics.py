"""A server's metrics over HTTP."""

from http import HTTPStatus

from trtforge.core.defaults import METRICS_URL
from trtforge.core.errors import ForgeError
from trtforge.formats.prometheus import Sample, parse_metrics
from trtforge.serve.plain_http import get

METRICS_HINT = (
    f"Give the address of its metrics, such as {METRICS_URL}, which `trtforge serve` prints after `metrics=`."
)
READ_SECONDS = 5.0
READ_BYTES = 4 << 20


def read_metrics(address: str) -> tuple[Sample, ...]:
    """All samples at HOST:PORT now. Raises NoAnswer without an answer, ForgeError for an answer that is not metrics."""
    answer = get(address, "/metrics", READ_SECONDS, longest=READ_BYTES)
    if answer.status != HTTPStatus.OK:
        raise ForgeError(f"{address} answers /metrics with HTTP {answer.status}", hint=METRICS_HINT)
    return parse_metrics(answer.text, address)
