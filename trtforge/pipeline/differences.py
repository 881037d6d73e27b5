"""Floor 5: whether two builds of one model differ by more than chance: intervals paired over the evaluated tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtforge.core import figures
from trtforge.core.extras import install_command
from trtforge.pipeline.compare import Compared
from trtforge.pipeline.metrics import kept_blocks
from trtforge.pipeline.paths import Paths
from trtforge.verify.result import Interval

TITLES = ("perplexity, against the first", "KL mean, against the first", "significant differences")
"""The rows of `compare` about differences."""
UNKNOWN = "the verification is of an older version: build again"
_FEWEST = "too few tokens for an interval: give the gate more samples"
_TOO_LARGE = "the losses are too large for an interval"


@dataclass(frozen=True)
class Difference:
    """How build `name` differs from build `baseline`: 95 % intervals, or the `reason` why there are none.

    `perplexity`: interval of the relative increase; `kl_mean`: of the increase in nats.
    """

    name: str
    baseline: str
    perplexity: Interval | None = None
    kl_mean: Interval | None = None
    reason: str | None = None

    @property
    def figures(self) -> dict[str, str]:
        """The texts to show, by title; `-` if unknown."""
        if self.perplexity is None or self.kl_mean is None:
            return dict.fromkeys(TITLES, figures.ABSENT)
        texts = (
            _said(self.perplexity, figures.change),
            _said(self.kl_mean, _signed),
            " and ".join(self._real) or "none shown",
        )
        return dict(zip(TITLES, texts, strict=True))

    @property
    def line(self) -> str:
        """The difference as one line of text."""
        against = f"{self.name} against {self.baseline}"
        if self.reason is not None:
            return f"{against}: {self.reason}"
        perplexity, divergence, real = self.figures.values()
        verb = "differ" if len(self._real) > 1 else "differs"
        said = f"{real} {verb} by more than chance" if self._real else "no difference is shown"
        return f"{against}: perplexity {perplexity}, mean KL {divergence} nats; {said}"

    @property
    def _real(self) -> list[str]:
        """The metrics whose interval excludes zero."""
        found = {"perplexity": self.perplexity, "KL": self.kl_mean}
        return [name for name, interval in found.items() if interval is not None and interval.excludes_zero]

    def as_json(self) -> dict[str, Any]:
        """For --json. `real`: whether the interval excludes zero."""
        return {
            "build": self.name,
            "baseline": self.baseline,
            "perplexity": _json(self.perplexity),
            "kl_mean": _json(self.kl_mean),
            "reason": self.reason,
        }


def differences(builds: Sequence[Compared]) -> tuple[Difference, ...]:
    """How each build differs from the first. Builds that were not verified are left out."""
    first, *others = builds
    return tuple(_difference(first, other) for other in others if None not in (first.kl_mean, other.kl_mean))


def _difference(first: Compared, other: Compared) -> Difference:
    one, two = (kept_blocks(Paths(_directory(build)).verification, build.kl_mean) for build in (first, other))
    if one is None or two is None:
        return Difference(other.name, first.name, reason=UNKNOWN)
    if not one.same_text(two):
        return Difference(other.name, first.name, reason="verified on other text, so they do not compare")
    if find_spec("numpy") is None:
        return Difference(other.name, first.name, reason=f"intervals need numpy: {install_command('engine')}")
    from trtforge.verify.bootstrap import LEAST_BLOCKS, divergence_difference, perplexity_difference

    perplexity, divergence = perplexity_difference(one, two), divergence_difference(one, two)
    if perplexity is None or divergence is None:
        reason = _FEWEST if len(one.tokens) < LEAST_BLOCKS else _TOO_LARGE
        return Difference(other.name, first.name, reason=reason)
    return Difference(other.name, first.name, perplexity, divergence)


def _directory(build: Compared) -> Path:
    path = Path(build.build)
    return path.parent if path.suffix == ".json" else path


def _said(interval: Interval, figure: Callable[[float], str]) -> str:
    return figures.interval((interval.low, interval.high), figure)


def _signed(value: float) -> str:
    return f"{value:+.2g}"


def _json(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else {"interval": [interval.low, interval.high], "real": interval.excludes_zero}
