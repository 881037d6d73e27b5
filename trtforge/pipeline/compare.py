"""Floor 5: compare builds: size, quality, times, estimated and measured speed, from their reports and bench.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import join
from typing import Any

from trtforge.core import figures
from trtforge.core.builds import builds_in, holds_builds
from trtforge.core.errors import UsageError
from trtforge.models.formats import FORMATS
from trtforge.pipeline.record import Record, read_record
from trtforge.pipeline.report_words import formats, layout, verdict
from trtforge.pipeline.speed import Measured, kept_speed
from trtforge.serve.speed import Level

_QUANTISED_BY_ENGINE_BUILD = {name for name, known in FORMATS.items() if known.algorithm and known.rounding is None}
"""The weight-only formats: the checkpoint has unquantised weights, which the engine build quantises."""


@dataclass(frozen=True)
class Compared:
    """One build; None: not in its report. `tokens_per_second`: the plan's largest estimate, not measured.

    `cached`: stages that were reused or came from the cache, so `seconds` does not include their computation.
    `measured`: the result of `trtforge bench` for its present repository.
    """

    name: str
    build: str
    recipe: str
    model: str | None
    parameters: int | None
    formats: str | None
    layout: str | None
    hardware: str | None
    source_bytes: int | None
    checkpoint_bytes: int | None
    engine_bytes: int | None
    smaller: float | None
    compression: float | None
    perplexity: float | None
    perplexity_increase: float | None
    perplexity_interval: tuple[float, float] | None
    kl_mean: float | None
    kl_mean_interval: tuple[float, float] | None
    kl_p99: float | None
    kl_p99_interval: tuple[float, float] | None
    top1_agreement: float | None
    gate: str
    seconds: float
    cached: tuple[str, ...]
    quant: str | None
    tokens_per_second: float | None
    measured: Measured | None = None

    @classmethod
    def of(cls, name: str, build: Path, record: Record, measured: Measured | None = None) -> "Compared":
        """From a build's report and its measured speed."""
        model, deployment, quality = record.model, record.deployment, record.verification
        curve, converted = record.estimates.curve if record.estimates else (), record.stage("convert")
        return cls(
            name=name,
            build=str(build),
            recipe=record.recipe,
            model=model.name if model else None,
            parameters=model.parameters if model else None,
            formats=formats(deployment) if deployment else None,
            layout=layout(deployment) if deployment else None,
            hardware=deployment.hardware if deployment else None,
            source_bytes=model.source_bytes if model else None,
            checkpoint_bytes=converted.bytes if converted else None,
            engine_bytes=record.engine_bytes,
            smaller=record.smaller,
            compression=record.compression,
            perplexity=quality.perplexity.candidate if quality else None,
            perplexity_increase=quality.perplexity.increase if quality else None,
            perplexity_interval=quality.perplexity.increase_interval if quality else None,
            kl_mean=quality.kl_mean if quality else None,
            kl_mean_interval=quality.kl_mean_interval if quality else None,
            kl_p99=quality.kl_p99 if quality else None,
            kl_p99_interval=quality.kl_p99_interval if quality else None,
            top1_agreement=quality.top1_agreement if quality else None,
            gate=verdict(quality),
            seconds=record.seconds,
            cached=tuple(stage.stage for stage in record.stages if stage.cached),
            quant=deployment.quant if deployment else None,
            tokens_per_second=max((point.tokens_per_second for point in curve), default=None),
            measured=measured,
        )

    @property
    def busiest(self) -> Level | None:
        """The measured level with the most requests at once."""
        return max(self.measured.speed.levels, key=lambda level: level.concurrency) if self.measured else None

    @property
    def measured_rate(self) -> str:
        """The measured rate with its concurrency."""
        level = self.busiest
        return f"{level.tokens_per_second:,.0f}, {level.concurrency} at once" if level else figures.ABSENT

    @property
    def figures(self) -> dict[str, str]:
        """The figures as text, by their title; `-` if unknown."""
        quantised = self.compression is not None and self.compression > 1
        speed = None if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}"
        level = self.busiest
        return {
            "source": figures.size(self.source_bytes),
            "checkpoint": figures.size(self.checkpoint_bytes),
            "engine": figures.size(self.engine_bytes),
            "size": figures.ratio(self.smaller),
            "quantised layers": f"{self.compression:.3g} times smaller" if quantised else figures.ABSENT,
            "perplexity": figures.perplexity(self.perplexity),
            "change": figures.change(self.perplexity_increase),
            "change, 95 %": figures.interval(self.perplexity_interval, figures.change),
            "KL mean, nats": figures.nats(self.kl_mean),
            "KL mean, 95 %": figures.interval(self.kl_mean_interval, figures.nats),
            "KL p99, nats": figures.nats(self.kl_p99),
            "KL p99, 95 %": figures.interval(self.kl_p99_interval, figures.nats),
            "top-1 agreement": figures.share(self.top1_agreement),
            "gate": self.gate,
            "build time": figures.duration(self.seconds) + (" (cached)" if self.cached else ""),
            "tokens/s, estimate": speed or figures.ABSENT,
            "tokens/s, measured": f"{level.tokens_per_second:,.0f}" if level else figures.ABSENT,
            "requests at once": f"{level.concurrency}" if level else figures.ABSENT,
            "first text": f"{level.first_text_ms:,.0f} ms" if level else figures.ABSENT,
            "each further token": f"{level.next_token_ms:,.1f} ms" if level else figures.ABSENT,
        }

    def as_json(self) -> dict[str, Any]:
        """For --json, in bytes, seconds and shares."""
        return asdict(self) | {"measured": self.measured.model_dump(mode="json") if self.measured else None}


def compared(builds: Sequence[Path]) -> tuple[Compared, ...]:
    """The reports of builds side by side. Raises UsageError for fewer than two, ForgeError for one without a report."""
    if len(builds) == 1 and len(held := builds_in(builds[0])) > 1:
        command = join(["trtforge", "compare", *map(str, held)])
        raise holds_builds(builds[0], held, f"Give the builds themselves. Run `{command}`.")
    if len(builds) < 2:
        raise UsageError("compare needs two builds or more", hint="Give the directories that `trtforge build` wrote.")
    names = _names(builds)
    return tuple(
        Compared.of(name, build, read_record(build, builds), kept_speed(place))
        for name, build, place in zip(names, builds, map(_place, builds), strict=True)
    )


def notes(builds: Sequence[Compared]) -> tuple[str, ...]:
    """Notes that the figures need to be read correctly."""
    at_build = sorted({build.quant for build in builds if build.quant in _QUANTISED_BY_ENGINE_BUILD})
    found = []
    if at_build:
        names = " and ".join(at_build)
        found.append(f"{names}: the engine build quantises the layers, so the checkpoint holds them unquantised")
    if any(build.cached for build in builds):
        found.append("cached: stages taken from the cache did not run; these times do not compare")
    return tuple(found)


def conditions(builds: Sequence[Compared]) -> tuple[str, ...]:
    """The conditions of the speed measurements: one line for all builds measured under the same conditions."""
    alike: dict[str, list[str]] = {}
    for build in builds:
        if build.measured is not None:
            speed, machine, busy = build.measured.speed, build.measured.machine, build.measured.busy
            text = f"prompts of {speed.prompt_tokens} tokens, answers of {speed.answer_tokens}; {machine}"
            alike.setdefault(text, []).append(f"{build.name} ({figures.number(busy, 2)})")
    return tuple(
        f"measured with {text}; processors that other work used before: {', '.join(names)}"
        for text, names in alike.items()
    )


def _names(builds: Sequence[Path]) -> list[str]:
    """The directories' names, with as many parents as make them distinct; repeated directories are numbered."""
    places = [_place(build).resolve() for build in builds]
    names = []
    for number, place in enumerate(places):
        others, name = [other for other in places if other != place], Path(place.name)
        for count in range(2, len(place.parts) + 1):
            if not any(other.parts[-len(name.parts) :] == name.parts for other in others):
                break
            name = Path(*place.parts[-count:])
        earlier = places[:number].count(place)
        names.append(f"{name} ({earlier + 1})" if earlier else str(name))
    return names


def _place(build: Path) -> Path:
    """The build directory; `build` may be the path of its report.json."""
    return build if build.suffix != ".json" else build.parent
