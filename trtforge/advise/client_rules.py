"""Rules about clients, from the counters of Triton's models and of OpenAI's API."""

from collections.abc import Callable, Iterator

from trtforge.advise.advice import Advice, Found, Missing
from trtforge.advise.readings import FEW_REQUESTS, Engine, Observation

_LONG_QUEUE_MS = 20.0
_LEAVING = 0.05  # of the requests


def refused(seen: Observation) -> Iterator[Found]:
    """Refused requests. Triton does not count them, as they are errors within a stream; trtforge's engines and the
    gateway do."""
    counts = _ended(seen, lambda each: each.refused, "refused", "429")
    for name in seen.readings[-1].models:
        if rejected := seen.model(name).failures.get("REJECTED", 0):
            counts[f"{rejected:.0f} requests to {name} were rejected by Triton"] = rejected
    refused, told = sum(counts.values()), ", ".join(counts)
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
    elif seen.gateway is None and all(engine.seen[-1].refused is None for engine in seen.engines):
        yield Missing(rule="refused", lacks="refusals: neither the engine nor OpenAI's API tells them")


def deadlines(seen: Observation) -> Iterator[Found]:
    """Requests that miss their deadline."""
    counts = _ended(seen, lambda each: each.late, "too late", "504")
    late, told = sum(counts.values()), ", ".join(counts)
    if late:
        yield Advice(
            rule="deadlines",
            limit="requests miss their deadline",
            evidence=f"{told} in {seen.seconds:.0f} s",
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


def _ended(seen: Observation, figure: Callable[[Engine], float | None], word: str, status: str) -> dict[str, float]:
    """Numbers of requests with this outcome, by texts that name the counter. The gateway's are included in its
    engines'."""
    counts = {
        f"{n:.0f} requests to {engine.name} were {word}": n for engine in seen.engines if (n := engine.growth(figure))
    }
    answered = seen.gateway or {}
    if not counts and answered.get(status):
        counts[f"OpenAI's API answered {status} to {answered[status]:.0f} of {sum(answered.values()):.0f} requests"] = (
            answered[status]
        )
    return counts
