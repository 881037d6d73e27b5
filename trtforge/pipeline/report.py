"""Floor 5: the report of a build: artifacts, sizes, times and quality; kept as report.json, report.html, report.md."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trtforge.core.artifact import Origin, Produced
from trtforge.core.builds import is_build
from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.replace import replace_text
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import rank_file, read_checkpoint_config
from trtforge.machine.usage import Usage
from trtforge.models.formats import FORMATS, algorithm_of
from trtforge.pipeline.paths import Paths
from trtforge.pipeline.record import Facts, Record
from trtforge.pipeline.report_facts import with_artifacts
from trtforge.pipeline.report_pages import build_markdown, build_page
from trtforge.verify.result import Verification

_FOUR_BITS = {each.algorithm for each in FORMATS.values() if each.rounding in ("int4", "nvfp4")}
_SCALES = ("weights_scaling_factor", "per_channel_scale")


@dataclass(frozen=True)
class StageReport:
    """One stage: `bytes` of its artifact, `peak_memory` of this process in bytes; `cached`: nothing was computed."""

    stage: str
    artifact: str | None
    bytes: int
    seconds: float
    peak_memory: int
    cached: bool
    origin: Origin

    @classmethod
    def of(cls, stage: str, produced: Produced, usage: Usage) -> "StageReport":
        """The report of a stage that wrote an artifact."""
        size, path = produced.manifest.total_bytes, str(produced.path)
        return cls(stage, path, size, usage.seconds, usage.peak_memory, produced.cached, produced.origin)

    @classmethod
    def of_verification(cls, usage: Usage, origin: Origin) -> "StageReport":
        """The report of verification, whose metrics are part of the report."""
        return cls("verify", None, 0, usage.seconds, usage.peak_memory, origin != "written", origin)


@dataclass
class BuildReport:
    """The whole build. `compression`: bytes of the linears in 16 bits / their bytes in the checkpoint.

    `compression` and `verification` are of the checkpoint that this run made or used. `warnings`: logged by the build.
    """

    recipe: str
    stages: list[StageReport] = field(default_factory=list)
    verification: Verification | None = None
    compression: float | None = None
    next_command: str = ""
    facts: Facts = field(default_factory=Facts)
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The content of report.json."""
        return {
            "recipe": self.recipe,
            "stages": [vars(stage) for stage in self.stages],
            "verification": self.verification.as_json() if self.verification else None,
            "compression": self.compression,
            "next": self.next_command,
            **self.facts.model_dump(mode="json"),
            "warnings": list(dict.fromkeys([*self.facts.warnings, *self.warnings])),
        }

    def record(self) -> Record:
        """The report as report.json's readers parse it."""
        return Record.parse(self.as_json(), "report")

    @contextmanager
    def collecting_warnings(self) -> Iterator[None]:
        """Add what is logged as a warning in this block to the report."""
        handler = _Warnings(self.warnings)
        log = logging.getLogger("trtforge")
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)


class _Warnings(logging.Handler):
    """Collects the texts of warnings."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        """Add one record."""
        self._found.append(record.getMessage())


def write_report(path: Path, report: BuildReport) -> None:
    """Replace report.json at `path` and the pages beside it. Raises ForgeError if they cannot be written.

    Facts of the artifacts are added to the report.
    """
    finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    paths = Paths(path.parent)
    verified = [str(paths.verification)] if report.verification is not None else []
    artifacts = [stage.artifact for stage in report.stages if stage.artifact is not None]
    report.facts = with_artifacts(report.facts, paths, [*artifacts, *verified], finished)
    record = report.record()
    _replace(path, json.dumps(report.as_json(), indent=2) + "\n")
    _replace(path.with_suffix(".html"), build_page(record))
    _replace(path.with_suffix(".md"), build_markdown(record))


def write_failure(path: Path, name: str, error: BaseException) -> None:
    """Replace report.md beside `path` by the error that ended a build, in a directory that has a build's files.

    report.json, which later builds read, and report.html stay those of the last build that finished.
    """
    said = f"error: {error.message}\nhint: {error.hint}" if isinstance(error, ForgeError) else "it was interrupted"
    older = f"{path.name} and {path.with_suffix('.html').name} are of an earlier build, if they exist."
    if is_build(path.parent):
        with suppress(OSError):
            replace_text(path.with_suffix(".md"), f"## {name}: failed\n\n```text\n{said}\n```\n\n{older}\n")


def _replace(path: Path, text: str) -> None:
    """Replace a file in one step."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}", hint="Free space or choose another --out.") from None


def weight_compression(checkpoint: Path) -> float:
    """Bytes of the quantised linears in 16 bits / their stored bytes with scales; 1 if nothing is quantised."""
    config = read_checkpoint_config(checkpoint)
    four_bits = algorithm_of(config.quantization) in _FOUR_BITS
    plain = stored = 0
    for rank in config.parallel.ranks:
        specs = {tensor.spec.name: tensor.spec for tensor in read_header(checkpoint / rank_file(rank.index))}
        for name, spec in specs.items():
            linear = name.removesuffix(".weight")
            if linear == name or not any(f"{linear}.{scales}" in specs for scales in _SCALES):
                continue
            packed = 2 if four_bits and spec.dtype != dtype_named("float8_e4m3fn") else 1  # FP8 in mixed precision
            plain += 2 * packed * spec.nbytes
            stored += sum(s.nbytes for n, s in specs.items() if n.startswith(f"{linear}.") and not n.endswith(".bias"))
    return plain / stored if stored else 1.0
