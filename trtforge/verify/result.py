"""The metrics of a verification, and whether they pass a gate."""

import math

from pydantic import Field, model_validator

from trtforge.core.config_model import Config
from trtforge.core.recipe import LIMITS, GateConfig


class Interval(Config):
    """A 95 % confidence interval (verify.bootstrap)."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference with this interval is significant."""
        return self.low > 0 or self.high < 0


class Blocks(Config):
    """Sums over consecutive tokens, by block: negative log-likelihoods of both models and divergence, in nats.

    All four fields have one value per block.
    """

    tokens: tuple[int, ...] = Field(default=())
    reference: tuple[float, ...] = Field(default=())
    candidate: tuple[float, ...] = Field(default=())
    divergence: tuple[float, ...] = Field(default=())

    @model_validator(mode="after")
    def _of_the_same_blocks(self) -> "Blocks":
        if len({len(sums) for sums in (self.tokens, self.reference, self.candidate, self.divergence)}) > 1:
            raise ValueError("tokens, reference, candidate and divergence differ in length")
        return self

    def same_text(self, other: "Blocks") -> bool:
        """Whether both are of the same reference and tokens, so that they can be compared in pairs."""
        pairs = zip(self.reference, other.reference, strict=False)
        return self.tokens == other.tokens and all(math.isclose(one, two, rel_tol=1e-3) for one, two in pairs)


class Perplexity(Config):
    """exp of the mean negative log-likelihood of the next token. `interval`: of the increase; None with few tokens."""

    reference: float
    candidate: float
    interval: Interval | None = None

    @property
    def increase(self) -> float:
        """The relative increase: 0.01 is one per cent worse than the reference."""
        return self.candidate / self.reference - 1


class Divergence(Config):
    """KL divergence from the reference, in nats per token: mean and 99th percentile; no intervals with few tokens."""

    mean: float
    p99: float
    mean_interval: Interval | None = None
    p99_interval: Interval | None = None


class Failure(Config):
    """A metric that fails the gate."""

    figure: str
    value: float
    limit: float

    def __str__(self) -> str:
        return f"{self.figure} is {self.value:.4g}, the gate limit is {self.limit:.4g}"


class LayerError(Config):
    """Error of a layer's output: norm of the difference from the reference / norm of the reference.

    `added`: the increase over the layer before, which is this layer's contribution.
    """

    layer: int
    error: float
    added: float


class Damage(Config):
    """Relative error of a decoder layer's output if only these linear layers are quantised."""

    modules: tuple[str, ...]
    error: float


class Verification(Config):
    """The metrics. `kl`: KL divergence. `blocks`: data for intervals of differences between verifications.

    `tensors_checked`: tensors of all ranks; copied ones are compared bit for bit, all contribute to the logits.
    `notes`: unknown facts of a foreign checkpoint, and differences of its config.json from the model's.
    """

    perplexity: Perplexity
    kl: Divergence
    top1_agreement: float
    max_abs_logit_error: float
    tokens: int
    tensors_checked: int
    failures: tuple[Failure, ...] = Field(default=())
    layers: tuple[LayerError, ...] = Field(default=())
    blocks: Blocks = Blocks()
    notes: tuple[str, ...] = Field(default=())

    @property
    def kl_mean(self) -> float:
        """Mean KL divergence in nats per token."""
        return self.kl.mean

    def judged_by(self, gate: GateConfig) -> "Verification":
        """The same metrics with the failures of `gate`."""
        found = failures(gate, self.perplexity.increase, self.top1_agreement, self.kl)
        return self.model_copy(update={"failures": found})

    @property
    def passed(self) -> bool:
        """Whether every metric passes the gate."""
        return not self.failures

    def as_json(self) -> dict[str, object]:
        """The output of `trtforge verify --json`."""
        return {
            "passed": self.passed,
            "perplexity": {
                "reference": _number(self.perplexity.reference),
                "candidate": _number(self.perplexity.candidate),
                "increase": _number(self.perplexity.increase),
                "increase_interval": _interval(self.perplexity.interval),
            },
            "kl_mean": _number(self.kl.mean),
            "kl_mean_interval": _interval(self.kl.mean_interval),
            "kl_p99": _number(self.kl.p99),
            "kl_p99_interval": _interval(self.kl.p99_interval),
            "top1_agreement": self.top1_agreement,
            "max_abs_logit_error": _number(self.max_abs_logit_error),
            "tokens": self.tokens,
            "tensors_checked": self.tensors_checked,
            "failures": [str(failure) for failure in self.failures],
            "notes": list(self.notes),
            **({"layers": self._layers(), "worst_layer": self.worst_layer} if self.layers else {}),
        }

    @property
    def worst_layer(self) -> int | None:
        """The layer that adds most to the error."""
        return max(self.layers, key=lambda layer: layer.added).layer if self.layers else None

    def _layers(self) -> list[dict[str, object]]:
        return [
            {"layer": layer.layer, "error": _number(layer.error), "added": _number(layer.added)}
            for layer in self.layers
        ]


def _number(value: float) -> float | None:
    """None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def _interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def failures(
    gate: GateConfig, perplexity_increase: float, top1_agreement: float, kl: Divergence
) -> tuple[Failure, ...]:
    """The metrics that fail `gate`; non-finite values always fail."""
    figures = {
        "perplexity_increase": perplexity_increase,
        "top1_agreement": top1_agreement,
        "kl_mean": kl.mean,
        "kl_p99": kl.p99,
    }
    assert tuple(figures) == LIMITS, "every limit of a gate has its figure"
    broken = {name: value for name, value in figures.items() if not math.isfinite(value)}
    if broken:
        return tuple(
            Failure(figure=name, value=value, limit=getattr(gate, name) or 0.0) for name, value in broken.items()
        )
    return tuple(
        Failure(figure=name, value=figures[name], limit=limit)
        for name, limit in gate.limits.items()
        if (figures[name] < limit if name == "top1_agreement" else figures[name] > limit)
    )
