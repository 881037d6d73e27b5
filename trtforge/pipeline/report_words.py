"""Floor 5: the texts of a report: metrics beside their limits, results of stages, formats and layout."""

from dataclasses import dataclass

from trtforge.core import figures
from trtforge.pipeline.record import (
    DeploymentRecord,
    GateRecord,
    MixedRecord,
    QualityRecord,
    RoundingRecord,
    StageRecord,
)


@dataclass(frozen=True)
class Metric:
    """A metric beside the gate's limit. `interval`: of 95 %, `-` if unknown. `passed`: None without a limit."""

    name: str
    value: str
    interval: str
    limit: str
    passed: bool | None

    @property
    def verdict(self) -> str:
        """The result in one or two words."""
        return {True: "passed", False: "failed", None: "no limit"}[self.passed]


def metrics(quality: QualityRecord, gate: GateRecord | None) -> tuple[Metric, ...]:
    """The metrics that a gate can limit; NaN and infinity fail. Older reports may lack the 99th percentile."""
    perplexity, increase = quality.perplexity, quality.perplexity.increase
    against = " against ".join(map(figures.perplexity, (perplexity.candidate, perplexity.reference)))
    limit = gate.perplexity_increase if gate else None
    agreement = gate.top1_agreement if gate else None
    found = [
        Metric(
            "perplexity",
            f"{against} ({figures.change(increase)})",
            figures.interval(perplexity.increase_interval, figures.change),
            "no limit" if limit is None else f"at most {figures.change(limit)}",
            _holds(increase, limit, least=False),
        ),
        Metric(
            "top-1 agreement",
            figures.share(quality.top1_agreement),
            figures.ABSENT,
            "no limit" if agreement is None else f"at least {figures.share(agreement)}",
            _holds(quality.top1_agreement, agreement, least=True),
        ),
        _divergence("mean KL divergence", quality.kl_mean, quality.kl_mean_interval, gate.kl_mean if gate else None),
    ]
    p99 = gate.kl_p99 if gate else None
    if quality.kl_p99 is not None or p99 is not None:
        found.append(_divergence("99th percentile of KL", quality.kl_p99, quality.kl_p99_interval, p99))
    return tuple(found)


def _divergence(name: str, value: float | None, interval: tuple[float, float] | None, limit: float | None) -> Metric:
    return Metric(
        name,
        f"{figures.nats(value)} nats",
        figures.interval(interval, figures.nats),
        "no limit" if limit is None else f"at most {figures.nats(limit)}",
        _holds(value, limit, least=False),
    )


def _holds(value: float | None, limit: float | None, *, least: bool) -> bool | None:
    if value is None:
        return False
    if limit is None:
        return None
    return value >= limit if least else value <= limit


def verdict(quality: QualityRecord | None) -> str:
    """passed, failed, or not verified."""
    if quality is None:
        return "not verified"
    return "passed" if quality.passed else "failed"


def outcome(stage: StageRecord, quality: QualityRecord | None) -> str:
    """The result of a stage: written, up to date or from the cache; for verification whether the gate passed."""
    if stage.stage == "verify" and not stage.cached:
        return verdict(quality)
    return stage.origin or ("already right" if stage.cached else "written")


def formats(deployment: DeploymentRecord) -> str:
    """The number formats in one line."""
    groups = f" in groups of {deployment.group_size}" if deployment.group_size else ""
    weights = "unquantised" if deployment.quant == "none" else f"{deployment.quant}{groups}"
    words = [f"weights {weights}"]
    if deployment.kv_cache != "none":
        words.append(f"KV cache {deployment.kv_cache}")
    return ", ".join([*words, *([deployment.dtype] if deployment.dtype else [])])


def layout(deployment: DeploymentRecord) -> str:
    """Tensor, pipeline and expert parallelism."""
    return f"tp {deployment.tp}, pp {deployment.pp}" + (f", ep {deployment.ep}" if deployment.ep > 1 else "")


def data_used(gate: GateRecord, tokens: int | None = None) -> str:
    """The data of the quality gate."""
    words = f"{gate.samples} samples of {gate.sequence_length} tokens"
    return words if tokens is None else f"{words}, {tokens:,} compared"


def rounding(record: RoundingRecord) -> str:
    """How the weights were rounded, and the share of the error that remains."""
    if record.method == "nearest":
        return "weights rounded to the nearest code"
    layers = f"{record.compensated} linear layers rounded with compensation"
    if record.error_left is not None:
        layers += f", which leaves {figures.share(record.error_left)} of the output error of rounding to the nearest"
    return f"{layers}; {record.nearest} rounded to the nearest" if record.nearest else layers


def mixed(record: MixedRecord, quality: QualityRecord | None) -> str:
    """The formats of mixed precision, and their predicted error beside the measured one."""
    total = sum(record.weights.values())
    shares = ", ".join(f"{name} {figures.share(count / total)}" for name, count in record.weights.items())
    measured = quality.layers[-1].error if quality is not None and quality.layers else None
    said = f", measured {figures.share(measured)}" if measured is not None else ""
    return (
        f"{record.bits:.4g} bits a weight, at most {record.budget:g}: {shares} of the weights; error of the decoder's "
        f"output: predicted {figures.share(record.predicted_error)}{said}, "
        f"at least {figures.share(record.least_error)} within the budget, "
        f"{figures.share(record.uniform_error)} predicted with one format"
    )
