"""What clients meet: rules over the counters of Triton's models and of OpenAI's API."""

from collections.abc import Iterator

from trtforge.advise.advice import Advice, Found, Missing
from trtforge.advise.readings import FEW_REQUESTS, Observation

_LONG_QUEUE_MS = 20.0
_LEAVING = 0.05  # of the requests


def refused(seen: Observation) -> Iterator[Found]:
    """What trtforge's engines refuse is an error within a stream, which Triton does not count; the gateway does."""
    refused = (seen.gateway or {}).get("429", 0)
    told = f"OpenAI's API answered 429 to {refused:.0f} of {sum((seen.gateway or {}).values()):.0f} requests"
    rejected = {name: seen.model(name).failures.get("REJECTED", 0) for name in seen.readings[-1].models}
    if not refused and any(rejected.values()):
        name = max(rejected, key=lambda each: rejected[each])
        refused, told = rejected[name], f"Triton rejected {rejected[name]:.0f} requests to {name}"
    if refused:
        yield Advice(
            rule="refused",
            limit="requests are refused, because the queue is full",
            evidence=f"{told} in {seen.seconds:.0f} s",
            change="Serve more requests at once (see the other advice, or add servers behind `trtforge gateway`); a "
            "longer queue only makes them wait.",
            setting="serving.max_queue_size, more servers",
            effect="fewer refusals; with a longer queue alone later answers",
            confidence="certain",
        )
    elif seen.gateway is None:
        yield Missing(
            rule="refused",
            lacks="the metrics of OpenAI's API: refusals within Triton's streams are counted nowhere else",
        )


def deadlines(seen: Observation) -> Iterator[Found]:
    """Requests that are late."""
    late, requests = (seen.gateway or {}).get("504", 0), sum((seen.gateway or {}).values())
    if late:
        yield Advice(
            rule="deadlines",
            limit="requests miss their deadline",
            evidence=f"OpenAI's API answered 504 to {late:.0f} of {requests:.0f} requests in {seen.seconds:.0f} s",
            change="Refuse earlier what would be late anyway, and find what they wait for (the other advice).",
            setting="serving.max_queue_seconds, serving.max_queue_size",
            effect="no work on answers that nobody gets",
            confidence="certain",
        )


def leaving(seen: Observation) -> Iterator[Found]:
    """Clients that do not wait for the end of their answer."""
    left, requests = (seen.gateway or {}).get("499", 0), sum((seen.gateway or {}).values())
    if requests >= FEW_REQUESTS and left / requests >= _LEAVING:
        yield Advice(
            rule="leaving",
            limit="clients leave before their answer has ended",
            evidence=f"{left:.0f} of {requests:.0f} requests left in {seen.seconds:.0f} s (499)",
            change="Compare the clients' time limits with `trtforge bench`; tune for latency.",
            setting="`trtforge tune REPO --goal latency`",
            effect="fewer answers that are computed in vain",
            confidence="possible",
        )


def python_models(seen: Observation) -> Iterator[Found]:
    """Requests that wait in Triton's queue of a text model, not in the engine's."""
    engines = set(seen.readings[-1].engines)
    for name in sorted(set(seen.readings[-1].models) - engines):
        model = seen.model(name)
        if model.count < FEW_REQUESTS:
            continue
        queue, compute = (figure / model.count / 1e3 for figure in (model.queue_us, model.infer_us))
        if queue < _LONG_QUEUE_MS or queue < compute:
            continue
        yield Advice(
            rule="python_models",
            limit=f"{name}: requests wait for this model, before they reach the engine",
            evidence=f"{model.count:.0f} requests waited {queue:.1f} ms each in Triton's queue of {name}, and were "
            f"computed for {compute:.1f} ms",
            change="Give the model more instances if it has one for all requests, or the server more processor cores.",
            setting=f"instance_group of {name}/config.pbtxt, processors of the container",
            effect="a shorter wait for the first token",
            confidence="likely",
        )
