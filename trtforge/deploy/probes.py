"""Probes of a container (startup, live, ready), and the command that waits until no request runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.api_keys import KEY_VARIABLE
from trtforge.core.defaults import LOOPBACK
from trtforge.core.server_errors import QUEUE_FULL, TRITON_QUEUE_FULL
from trtforge.deploy.values import Node
from trtforge.formats.prometheus import GENERAL, REQUESTS

STARTUP_PERIOD, LIVE_PERIOD, READY_PERIOD = 10, 10, 20  # seconds
FAILURES = 3
READY_TIMEOUT = READY_PERIOD  # seconds; a full queue answers late
_METRICS_TIMEOUT = 2  # seconds
PRE_STOP = 5  # seconds until load balancers stop sending requests to a terminating pod
PULL_SECONDS = 1800  # seconds to pull an image of 20 GB
EXIT_MARGIN = 15  # seconds after draining

_KEY = "^[[:space:]]*[^#[:space:]]"  # the first line that is neither empty nor a comment
_GENERATE = """\
import json, re, urllib.error, urllib.request
def iterations():
    try:
        text = urllib.request.urlopen("http://{metrics}/metrics", timeout={metrics_timeout}).read().decode()
    except OSError:
        return []
    return re.findall(r'{general}{{.*"iteration_counter".*}} (\\S+)', text)
before = iterations()
body = json.dumps({{"text_input": "Hello", "max_tokens": 1}}).encode()
headers = {{"Content-Type": "application/json"}}
request = urllib.request.Request("http://{url}/v2/models/{model}/generate", body, headers)
try:
    urllib.request.urlopen(request, timeout={timeout}).read()
except urllib.error.HTTPError as error:
    text = error.read().decode()
    if not any(full in text for full in {full}):
        raise
except TimeoutError:
    if iterations() in ([], before):
        raise
"""
_DRAIN = """\
import re, time, urllib.request
until = time.monotonic() + {seconds}
time.sleep({before})
while time.monotonic() < until:
    text = urllib.request.urlopen("http://{url}/metrics", timeout=5).read().decode()
    if not any(map(float, re.findall(r'{requests}{{.*"(?:active|waiting)".*}} (\\S+)', text))):
        break
    time.sleep(1)
"""


@dataclass(frozen=True)
class Probes:
    """HTTP paths of `startup` and `live`; `ready` is a command that queries the engine.

    Pods with a full queue stay ready, so that clients get their refusal instead of no server at all.
    """

    startup: str
    live: str
    ready: tuple[str, ...]


def embedded_probes(model: str, port: int, keys: Path | None) -> Probes:
    """Probes of `trtforge serve`. With `keys` the probe sends the first key of the file.

    The ready probe's request generates nothing, so it is answered however many requests wait.
    """
    probe = ("trtforge", "probe", "live", "--url", f"{LOOPBACK}:{port}", "--model", model)
    command: tuple[str, ...] = (*probe, "--timeout", str(READY_TIMEOUT - 1))
    if keys is not None:
        key = f"$(grep -m1 '{_KEY}' {keys} | tr -d '[:space:]')"  # keys have no white space, lines may end with some
        command = ("sh", "-c", f"export {KEY_VARIABLE}={key}; exec {' '.join(command)}")
    return _probes(command)


def triton_probes(model: str, port: int, metrics: int) -> Probes:
    """Probes of Triton itself, whose image has Python and not trtforge.

    Ready if a token is generated, the queue is full, or the engine makes progress while the probe's request waits.
    """
    program = _GENERATE.format(
        url=f"{LOOPBACK}:{port}",
        metrics=f"{LOOPBACK}:{metrics}",
        model=model,
        general=GENERAL,
        metrics_timeout=_METRICS_TIMEOUT,
        timeout=READY_TIMEOUT - 2 * _METRICS_TIMEOUT - 1,
        full=(QUEUE_FULL, TRITON_QUEUE_FULL),
    )
    return _probes(("python3", "-c", program))


def drain_command(port: int, seconds: int) -> tuple[str, ...]:
    """A command that waits up to `seconds` until no request runs, because mpirun ends its ranks a second after the
    signal."""
    program = _DRAIN.format(url=f"{LOOPBACK}:{port}", requests=REQUESTS, seconds=PRE_STOP + seconds, before=PRE_STOP)
    return ("python3", "-c", program)


def _probes(ready: tuple[str, ...]) -> Probes:
    return Probes("/v2/health/ready", "/v2/health/live", ready)


def startup_failures(seconds: int) -> int:
    """The number of failures of the startup probe within this time."""
    return -(-seconds // STARTUP_PERIOD)


def http_probe(path: str, period: int, failures: Node) -> Mapping[str, Node]:
    """A probe of the HTTP port in Kubernetes' form."""
    get = {"path": path, "port": "http"}
    return {"httpGet": get, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}
