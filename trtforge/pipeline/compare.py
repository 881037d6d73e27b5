"""Floor 5: builds side by side: size, quality, times and estimated speed, from their reports alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtforge.core import figures
from trtforge.core.errors import UsageError
from trtforge.pipeline.record import Record, read_record
from trtforge.pipeline.report_words import formats, layout, verdict


@dataclass(frozen=True)
class Compared:
    """One build. None: its report does not say. `tokens_per_second`: the plan's largest estimate, not measured."""

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
    kl_mean: float | None
    top1_agreement: float | None
    gate: str
    seconds: float
    tokens_per_second: float | None

    @classmethod
    def of(cls, name: str, build: Path, record: Record) -> "Compared":
        """What a report says."""
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
            kl_mean=quality.kl_mean if quality else None,
            top1_agreement=quality.top1_agreement if quality else None,
            gate=verdict(quality),
            seconds=record.seconds,
            tokens_per_second=max((point.tokens_per_second for point in curve), default=None),
        )

    @property
    def figures(self) -> dict[str, str]:
        """The figures as people read them, by their title; `-` for what is not known."""
        quantised = self.compression is not None and self.compression > 1
        speed = None if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}"
        return {
            "source": figures.size(self.source_bytes),
            "checkpoint": figures.size(self.checkpoint_bytes),
            "engine": figures.size(self.engine_bytes),
            "size": figures.ratio(self.smaller),
            "quantised layers": f"{self.compression:.3g} times smaller" if quantised else figures.ABSENT,
            "perplexity": figures.perplexity(self.perplexity),
            "change": figures.change(self.perplexity_increase),
            "KL mean, nats": figures.number(self.kl_mean, 3),
            "top-1 agreement": figures.share(self.top1_agreement),
            "gate": self.gate,
            "build time": figures.duration(self.seconds),
            "tokens/s, estimate": speed or figures.ABSENT,
        }

    def as_json(self) -> dict[str, Any]:
        """For --json, in bytes, seconds and shares."""
        return asdict(self)


def compared(builds: Sequence[Path]) -> tuple[Compared, ...]:
    """The reports of builds side by side. Raises UsageError for fewer than two, ForgeError for one without a report."""
    if len(builds) < 2:
        raise UsageError("compare needs two builds or more", hint="Give the directories that `trtforge build` wrote.")
    names = _names(builds)
    return tuple(Compared.of(name, build, read_record(build)) for name, build in zip(names, builds, strict=True))


def _names(builds: Sequence[Path]) -> list[str]:
    """The directories' names, with their parents where two are alike."""
    places = [build if build.suffix != ".json" else build.parent for build in builds]
    short = [place.resolve().name for place in places]
    return [
        name if short.count(name) == 1 else "/".join(place.resolve().parts[-2:])
        for name, place in zip(short, places, strict=True)
    ]
