"""Floor 5: where a build puts its artifacts and its report."""

from dataclasses import dataclass
from pathlib import Path

from trtforge.core.builds import REPORT_FILE


@dataclass(frozen=True)
class Paths:
    """Where a build puts its artifacts."""

    out: Path

    @property
    def calibration(self) -> Path:
        """The calibration; absent for formats that need none."""
        return self.out / "calibration"

    @property
    def checkpoint(self) -> Path:
        """The TensorRT-LLM checkpoint."""
        return self.out / "checkpoint"

    @property
    def verification(self) -> Path:
        """The metrics of the checkpoint."""
        return self.out / "verification"

    @property
    def engine(self) -> Path:
        """The engine."""
        return self.out / "engine"

    @property
    def repository(self) -> Path:
        """The Triton model repository."""
        return self.out / "repository"

    @property
    def report(self) -> Path:
        """The report: artifacts, sizes, times and quality."""
        return self.out / REPORT_FILE

    @property
    def speed(self) -> Path:
        """The measured speed, if it was measured."""
        return self.out / "bench.json"

    @property
    def tuning(self) -> Path:
        """The result of tuning, if the build was tuned."""
        return self.out / "tune.json"
