"""Floor 5: the report of a build: artifacts, sizes, times and quality; kept as `report.json`."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtforge.core.artifact import Origin, Produced
from trtforge.core.dtypes import dtype_named
from trtforge.core.errors import ForgeError
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import rank_file, read_checkpoint_config
from trtforge.machine.usage import Usage
from trtforge.verify.result import Verification


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
    def of_verification(cls, result: Verification, usage: Usage, *, cached: bool) -> "StageReport":
        """The report of verification, which writes no artifact."""
        origin: Origin = "already right" if cached else "written"
        return cls("verify", None, 0, usage.seconds, usage.peak_memory, cached, origin)


@dataclass
class BuildReport:
    """All of a build. `compression`: bytes of the linears in 16 bits / their bytes in the checkpoint.

    Both are of the checkpoint that this run made or used.
    """

    recipe: str
    stages: list[StageReport] = field(default_factory=list)
    verification: Verification | None = None
    compression: float | None = None
    next_command: str = ""

    def as_json(self) -> dict[str, Any]:
        """The content of report.json."""
        return {
            "recipe": self.recipe,
            "stages": [vars(stage) for stage in self.stages],
            "verification": self.verification.as_json() if self.verification else None,
            "compression": self.compression,
            "next": self.next_command,
        }


def write_report(path: Path, report: BuildReport) -> None:
    """Replace report.json in one step. Raises ForgeError if it cannot be written."""
    draft = path.with_name(f".{path.name}.partial")
    try:
        draft.write_text(json.dumps(report.as_json(), indent=2) + "\n")
        os.replace(draft, path)
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}", hint="Free space or choose another --out.") from None


def weight_compression(checkpoint: Path) -> float:
    """Bytes of the quantised linears in 16 bits / their stored bytes with scales; 1 if nothing is quantised."""
    config = read_checkpoint_config(checkpoint)
    plain = stored = 0
    for rank in config.parallel.ranks:
        specs = {tensor.spec.name: tensor.spec for tensor in read_header(checkpoint / rank_file(rank.index))}
        for name, spec in specs.items():
            linear = name.removesuffix(".weight")
            scales = f"{linear}.weights_scaling_factor"
            if linear == name or scales not in specs:
                continue
            packed = 2 if spec.dtype == dtype_named("int8") else 1
            plain += 2 * packed * spec.nbytes
            stored += sum(s.nbytes for n, s in specs.items() if n.startswith(f"{linear}.") and not n.endswith(".bias"))
    return plain / stored if stored else 1.0
