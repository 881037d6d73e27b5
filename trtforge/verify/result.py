"""The metrics of a verification, and whether they pass a gate."""

import math

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.recipe import GateConfig


class Perplexity(Config):
    """exp of the mean negative log-likelihood of the next token."""

    reference: float
    candidate: float

    @property
    def increase(self) -> float:
        """Relative: 0.01 is one per cent worse than the reference."""
        return self.candidate / self.reference - 1


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
    """The metrics. `kl_mean` in nats per token.

    `tensors_checked`: tensors of all ranks; copied ones are compared bit for bit, all contribute to the logits.
    """

    perplexity: Perplexity
    kl_mean: float
    top1_agreement: float
    max_abs_logit_error: float
    tokens: int
    tensors_checked: int
    failures: tuple[Failure, ...] = Field(default=())
    layers: tuple[LayerError, ...] = Field(default=())

    def judged_by(self, gate: GateConfig) -> "Verification":
        """The same metrics with the failures of `gate`."""
        found = failures(gate, self.perplexity.increase, self.top1_agreement, self.kl_mean)
        return self.model_copy(update={"failures": found})

    @property
    def passed(self) -> bool:
        """Whether every metric passes the gate."""
        return not self.failures

    def as_json(self) -> dict[str, object]:
        """The object that `trtforge verify --json` prints."""
        return {
            "passed": self.passed,
            "perplexity": {
                "reference": _number(self.perplexity.reference),
                "candidate": _number(self.perplexity.candidate),
                "increase": _number(self.perplexity.increase),
            },
            "kl_mean": _number(self.kl_mean),
            "top1_agreement": self.top1_agreement,
            "max_abs_logit_error": _number(self.max_abs_logit_error),
            "tokens": self.tokens,
            "tensors_checked": self.tensors_checked,
            "failures": [str(failure) for failure in self.failures],
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


def failures(
    gate: GateConfig, perplexity_increase: float, top1_agreement: float, kl_mean: float
) -> tuple[Failure, ...]:
    """The metrics that fail `gate`; non-finite values always fail."""
    figures = {"perplexity_increase": perplexity_increase, "top1_agreement": top1_agreement, "kl_mean": kl_mean}
    broken = [name for name, value in figures.items() if not math.isfinite(value)]
    if broken:
        return tuple(Failure(figure=name, value=figures[name], limit=getattr(gate, name) or 0.0) for name in broken)
    found = []
    if gate.perplexity_increase is not None and perplexity_increase > gate.perplexity_increase:
        found.append(Failure(figure="perplexity_increase", value=perplexity_increase, limit=gate.perplexity_increase))
    if gate.top1_agreement is not None and top1_agreement < gate.top1_agreement:
        found.append(Failure(figure="top1_agreement", value=top1_agreement, limit=gate.top1_agreement))
    if gate.kl_mean is not None and kl_mean > gate.kl_mean:
        found.append(Failure(figure="kl_mean", value=kl_mean, limit=gate.kl_mean))
    return tuple(found)
