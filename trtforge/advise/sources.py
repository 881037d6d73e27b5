"""Finds a server's metrics and model configuration from any of its addresses, and reads them over an interval."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from trtforge.advise.readings import Observation, Reading, Settings
from trtforge.core.defaults import HTTP_PORT, METRICS_PORT
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.json_text import parse_json
from trtforge.serve.address import LAST_PORT, Address
from trtforge.serve.detached.registry import Registry
from trtforge.serve.metrics import METRICS_HINT, READ_BYTES, READ_SECONDS, read_metrics
from trtforge.serve.plain_http import Answer, NoAnswer, get
from trtforge.serve.spoken import spoken

_PERIOD = 0.5  # seconds between readings; gauges are updated every 0.1 s
_TRITON, _GATEWAY = ("nv_inference_", "nv_trt_llm_"), ("trtforge_gateway_",)


@dataclass(frozen=True)
class Sources:
    """Addresses as HOST:PORT. `metrics`: of the requested server; `http`: possible addresses of the model
    configuration."""

    metrics: tuple[str, ...]
    http: tuple[str, ...]

    @classmethod
    def at(cls, urls: Sequence[str]) -> "Sources":
        """The sources of a server, from addresses of its metrics, its API, or OpenAI's API beside it.

        For an address without metrics, those of the background server with this address are tried, then nearby ports.
        Raises UsageError for an invalid address, ForgeError if there are no metrics.
        """
        metrics: dict[str, None] = {}
        http: dict[str, None] = {}
        for url in urls:
            address = _address(url)
            known = next((each for each in _detached() if address in each), ())
            found = [each for each in (address, *known) if _has_metrics(each, (*_TRITON, *_GATEWAY))]
            if not any(_has_metrics(each, _TRITON) for each in found):
                found += [each for each in _nearby(address) if _has_metrics(each, _TRITON)][:1]
            if not found:
                raise _without_metrics(address)
            metrics |= dict.fromkeys(found)
            http |= dict.fromkeys((address, *known))
        servers = [each for each in metrics if _has_metrics(each, _TRITON)]
        if len(servers) > 1:
            raise UsageError(f"{' and '.join(servers)} are two servers", hint="Run the command once for each.")
        host, _, port = next(iter(servers or metrics)).rpartition(":")
        default = int(port) - METRICS_PORT + HTTP_PORT
        beside = [f"{host}:{default}"] if servers and default > 0 else []
        return cls(tuple(metrics), tuple(dict.fromkeys([*http, *beside])))

    def reading(self) -> Reading:
        """All present metrics. Raises NoAnswer if a server is gone, ForgeError for an answer that is not metrics."""
        samples = [sample for address in self.metrics for sample in read_metrics(address)]
        return Reading.of(time.monotonic(), samples)

    def settings(self, models: Sequence[str]) -> tuple[dict[str, Settings], dict[str, set[int]]]:
        """The parameters of these models if a server reports them, and the statuses of refused requests for others."""
        found: dict[str, Settings] = {}
        refusals: dict[str, set[int]] = {}
        for address in self.http:
            for model in models:
                answer = None if model in found else _answer(address, model)
                if answer is not None and answer.status == HTTPStatus.OK:
                    parameters = _parameters(answer.text, address)
                    found |= {model: parameters} if parameters is not None else {}
                elif answer is not None:
                    refusals.setdefault(model, set()).add(answer.status)
        return found, refusals


def observe(sources: Sources, seconds: float, done: Callable[[float], None]) -> tuple[Observation, str]:
    """Read the metrics for `seconds`; `done` is called with the seconds since its last call.

    The second value is the reason why the observation ended early, empty if it did not. Raises ForgeError with fewer
    than two readings.
    """
    readings = [sources.reading()]
    settings, refusals = sources.settings(list(readings[0].engines))
    until, ended = time.monotonic() + seconds, ""
    while (left := until - time.monotonic()) > 0 or len(readings) < 2:
        pause = min(_PERIOD, max(left, _PERIOD / 10))
        time.sleep(pause)
        try:
            readings.append(sources.reading())
        except ForgeError as error:
            if len(readings) < 2:
                raise
            ended = error.message
            break
        done(pause)
    return Observation(readings, settings, refusals), ended


def _has_metrics(address: str, prefixes: tuple[str, ...]) -> bool:
    try:
        return any(sample.name.startswith(prefixes) for sample in read_metrics(address))
    except ForgeError:
        return False


def _address(url: str) -> str:
    rest = url.removeprefix("http://").removeprefix("grpc://").rstrip("/")
    for ending in ("/metrics", "/v1"):
        rest = rest.removesuffix(ending)
    if "://" in rest:
        raise UsageError(f"{url}: metrics are read over HTTP without TLS", hint=METRICS_HINT)
    if rest and ":" not in rest:
        rest = f"{rest}:{METRICS_PORT}"
    try:
        parsed = Address.parse(rest)
    except ValueError as error:
        raise UsageError(f"{url}: {error}", hint=METRICS_HINT) from None
    if parsed.path is not None:
        raise UsageError(f"{url}: metrics are not on a Unix socket", hint=METRICS_HINT)
    return rest


def _detached() -> list[tuple[str, ...]]:
    """The addresses of each server in the background: metrics, HTTP, gRPC, OpenAI's API."""
    records = [server.record for server in Registry.of_user().found() if server.alive]
    return [
        tuple(filter(None, (each.metrics, each.http, each.grpc, _address(each.openai) if each.openai else "")))
        for each in records
        if each is not None
    ]


def _nearby(address: str) -> list[str]:
    """Default addresses of the metrics of a server with this address, given consecutive ports of HTTP, gRPC, metrics,
    OpenAI's API."""
    if spoken(address) is None:
        return []
    host, _, port = address.rpartition(":")
    ports = (int(port) + 2, int(port) + 1, int(port) - 1)
    return [f"{host}:{each}" for each in ports if 0 < each <= LAST_PORT]


def _without_metrics(address: str) -> ForgeError:
    try:
        samples = read_metrics(address)
    except ForgeError as error:
        return ForgeError(error.message, hint=METRICS_HINT)
    others = ", ".join(sorted({sample.name for sample in samples})[:3]) or "none at all"
    return ForgeError(f"{address} has no metrics of Triton or of trtforge ({others})", hint=METRICS_HINT)


def _answer(address: str, model: str) -> Answer | None:
    """The answer to a request for Triton's model configuration, which `trtforge serve --open model-config` opens."""
    try:
        return get(address, f"/v2/models/{model}/config", READ_SECONDS, longest=READ_BYTES, keyed=True)
    except NoAnswer:
        return None


def _parameters(text: str, address: str) -> Settings | None:
    """The parameters in a model configuration; None if it has none."""
    try:
        values = parse_json(text, address, hint="")
    except ForgeError:
        return None
    parameters = values.get("parameters") if isinstance(values, dict) else None
    if not isinstance(parameters, Mapping):
        return None
    return {
        key: value["string_value"]
        for key, value in parameters.items()
        if isinstance(value, dict) and isinstance(value.get("string_value"), str)
    }
