"""A server's metrics at one moment and over an interval, typed; None for unreported values."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.formats.prometheus import BATCHER, ENDED, GENERAL, KV_BLOCKS, REQUESTS, Sample

_ENGINE = {
    REQUESTS: ("request_type", {"active", "max", "scheduled", "waiting"}),
    KV_BLOCKS: ("kv_cache_block_type", {"max", "used", "reused"}),
    BATCHER: ("inflight_batcher_specific_metric", {"total_context_tokens", "paused_requests"}),
    GENERAL: ("general_type", {"iteration_counter"}),
    "trtforge_speculative_decoding": ("draft_tokens", {"drafted", "accepted"}),
    ENDED: ("ended", {"refused", "late"}),
}
"""The metric families of an engine: the label that distinguishes the values, and the values that are read."""
FEW_REQUESTS = 10
"""Fewer requests within an interval are too few to judge."""
_PREFIXES = {REQUESTS: "requests_", KV_BLOCKS: "blocks_"}
_MODEL = {
    "nv_inference_count": "count",
    "nv_inference_queue_duration_us": "queue_us",
    "nv_inference_compute_infer_duration_us": "infer_us",
}


class Engine(Config):
    """Gauges of one engine model.

    trtforge's engines count paused requests and context tokens since the start; TensorRT-LLM's backend reports those of
    the last iteration.
    """

    requests_active: float | None = None
    requests_max: float | None = None
    requests_scheduled: float | None = None
    requests_waiting: float | None = None
    blocks_max: float | None = None
    blocks_used: float | None = None
    blocks_reused: float | None = None
    total_context_tokens: float | None = None
    paused_requests: float | None = None
    iteration_counter: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    refused: float | None = None
    late: float | None = None

    @property
    def counts_since_start(self) -> bool:
        """Whether it is an engine of trtforge."""
        return self.drafted is not None

    @property
    def waiting(self) -> float | None:
        """Number of waiting requests; older releases of TensorRT-LLM's backend report only the active ones."""
        if self.requests_waiting is not None or self.requests_active is None or self.requests_scheduled is None:
            return self.requests_waiting
        return max(0.0, self.requests_active - self.requests_scheduled)

    @property
    def full(self) -> bool:
        """Whether the batch is full."""
        return bool(self.requests_max) and (self.requests_scheduled or 0) >= (self.requests_max or 0)

    @property
    def blocks_share(self) -> float | None:
        """The share of the KV blocks in use."""
        return None if self.blocks_used is None or not self.blocks_max else self.blocks_used / self.blocks_max


class Model(Config):
    """Triton's counters of one model since the start. `failures`: by reason."""

    count: float = 0
    queue_us: float = 0
    infer_us: float = 0
    failures: dict[str, float] = Field(default_factory=dict)


class Reading(Config):
    """All metrics of one moment. `at`: seconds on a clock that only these readings share.

    `gateway`: requests of OpenAI's API by status; None if its metrics were not read. `gpus`: their utilisation.
    """

    at: float
    engines: dict[str, Engine]
    models: dict[str, Model]
    gateway: dict[str, float] | None = None
    gpus: tuple[float, ...] = ()

    @classmethod
    def of(cls, at: float, samples: Iterable[Sample]) -> "Reading":
        """The reading from these samples; unknown ones are ignored."""
        engines: dict[str, dict[str, float]] = {}
        models: dict[str, dict[str, float]] = {}
        failures: dict[str, dict[str, float]] = {}
        gateway: dict[str, float] | None = None
        gpus = []
        for sample in samples:
            model = "".join(letter if letter.isprintable() else "?" for letter in sample.labels.get("model", ""))
            if sample.name in _ENGINE:
                label, known = _ENGINE[sample.name]
                kind = sample.labels.get(label, "")
                if kind in known:
                    engines.setdefault(model, {})[f"{_PREFIXES.get(sample.name, '')}{kind}"] = sample.value
            elif sample.name in _MODEL:
                _add(models.setdefault(model, {}), _MODEL[sample.name], sample.value)
            elif sample.name == "nv_inference_request_failure":
                _add(failures.setdefault(model, {}), sample.labels.get("reason", "OTHER"), sample.value)
            elif sample.name == "nv_gpu_utilization":
                gpus.append(sample.value)
            elif sample.name.startswith("trtforge_gateway_"):
                gateway = gateway or {}
                if sample.name == "trtforge_gateway_requests_total":
                    _add(gateway, sample.labels.get("status", ""), sample.value)
        return cls(
            at=at,
            engines={name: Engine(**figures) for name, figures in engines.items()},
            models={
                name: Model(**models.get(name, {}), failures=failures.get(name, {})) for name in {**models, **failures}
            },
            gateway=gateway,
            gpus=tuple(gpus),
        )


def _add(counts: dict[str, float], key: str, value: float) -> None:
    """Add to a count: Triton has one per version of a model and per GPU with instances."""
    counts[key] = counts.get(key, 0.0) + value


Settings = Mapping[str, str]
"""Parameters of an engine model's config.pbtxt."""


@dataclass(frozen=True)
class Observation:
    """At least two readings of one server. `settings`: of an engine, by its model; absent if not accessible.

    `refusals`: HTTP statuses of refused requests for them, by model; 401: without a valid API key.
    """

    readings: Sequence[Reading]
    settings: Mapping[str, Settings]
    refusals: Mapping[str, Collection[int]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first reading to the last."""
        return self.readings[-1].at - self.readings[0].at

    def engine(self, name: str) -> "EngineObserved":
        """One engine over the interval."""
        seen = [reading.engines[name] for reading in self.readings if name in reading.engines]
        return EngineObserved(name, seen, self.settings.get(name))

    @property
    def engines(self) -> list["EngineObserved"]:
        """The engines of the last reading."""
        return [self.engine(name) for name in self.readings[-1].engines]

    def model(self, name: str) -> Model:
        """The counts of a model within the interval."""
        first, last = self.readings[0].models.get(name, Model()), self.readings[-1].models[name]
        return Model(
            count=grown(first.count, last.count),
            queue_us=grown(first.queue_us, last.queue_us),
            infer_us=grown(first.infer_us, last.infer_us),
            failures={reason: grown(first.failures.get(reason, 0), n) for reason, n in last.failures.items()},
        )

    @property
    def gateway(self) -> dict[str, float] | None:
        """Requests of OpenAI's API within the interval, by status."""
        first, last = self.readings[0].gateway, self.readings[-1].gateway
        return None if last is None else {status: grown((first or {}).get(status, 0), n) for status, n in last.items()}


@dataclass(frozen=True)
class EngineObserved:
    """One engine over the interval. `settings`: None if unknown."""

    name: str
    seen: Sequence[Engine]
    settings: Settings | None

    def share(self, holds: Callable[[Engine], bool]) -> float:
        """The share of the readings for which `holds` is true."""
        return sum(map(holds, self.seen)) / len(self.seen) if self.seen else 0.0

    def mean(self, figure: Callable[[Engine], float | None]) -> float | None:
        """The mean of a gauge; None if the server lacks it."""
        found = [value for engine in self.seen if (value := figure(engine)) is not None]
        return sum(found) / len(found) if found else None

    def growth(self, figure: Callable[[Engine], float | None]) -> float | None:
        """The growth of a counter; None if the server lacks it."""
        found = [value for engine in self.seen if (value := figure(engine)) is not None]
        return grown(found[0], found[-1]) if found else None


def grown(first: float, last: float) -> float:
    """The growth of a counter; a smaller value means that it restarted with the server."""
    return last - first if last >= first else last
