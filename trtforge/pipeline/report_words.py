"""Floor 5: what a report says in words: metrics beside their limits, results of stages, formats and layout."""

from collections.abc import Callable
from dataclasses import dataclass

from trtforge.core import figures
from trtforge.pipeline.record import DeploymentRecord, GateRecord, QualityRecord, RoundingRecord, StageRecord


@dataclass(frozen=True)
class Metric:
    """A metric beside the gate's limit. `passed` is None without a limit."""

    name: str
    value: str
    limit: str
    passed: bool | None

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "passed", False: "failed", None: "no limit"}[self.passed]


def metrics(quality: QualityRecord, gate: GateRecord | None) -> tuple[Metric, ...]:
    """The three metrics that a gate can limit; NaN and infinity fail."""
    increase, divergence = quality.perplexity.increase, quality.kl_mean
    perplexity = " against ".join(map(figures.perplexity, (quality.perplexity.candidate, quality.perplexity.reference)))
    rows: list[tuple[str, float | None, str, Callable[[float], str], float | None, bool]] = [
        (
            "perplexity",
            increase,
            f"{perplexity} ({figures.change(increase)})",
            lambda limit: f"at most {figures.change(limit)}",
            gate.perplexity_increase if gate else None,
            False,
        ),
        (
            "top-1 agreement",
            quality.top1_agreement,
            figures.share(quality.top1_agreement),
            lambda limit: f"at least {figures.share(limit)}",
            gate.top1_agreement if gate else None,
            True,
        ),
        (
            "mean KL divergence",
            divergence,
            f"{figures.number(divergence, 3)} nats",
            lambda limit: f"at most {figures.number(limit, 3)}",
            gate.kl_mean if gate else None,
            False,
        ),
    ]
    return tuple(
        Metric(name, text, "no limit" if limit is None else said(limit), _holds(value, limit, least=least))
        for name, value, text, said, limit, least in rows
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
    """What a stage did: written, already right, from the cache; of verification whether the gate holds."""
    if stage.stage == "verify" and not stage.cached:
        return verdict(quality)
    return stage.origin


def formats(deployment: DeploymentRecord) -> str:
    """The number formats in a line."""
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
    """How the weights were rounded, and what that leaves of the error."""
    if record.method == "nearest":
        return "weights rounded to the nearest code"
    layers = f"{record.compensated} linear layers rounded with compensation"
    if record.error_left is not None:
        layers += f", which leaves {figures.share(record.error_left)} of the output error of rounding to the nearest"
    return f"{layers}; {record.nearest} rounded to the nearest" if record.nearest else layers
