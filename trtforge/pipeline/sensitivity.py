"""Floor 5: find the linear layers that must stay unquantised for a quality gate to hold.

The ranking is predicted from second moments, or measured with each layer quantised alone. Layers are excluded in its
order; bisection finds how many, and each step converts and verifies a checkpoint.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trtforge.calibrate.sensitivity import predict_damages
from trtforge.calibrate.stage import CalibrateConfig
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.manifest import require_manifest
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import GateConfig
from trtforge.pipeline.report_facts import sensitivity_file
from trtforge.verify.result import Damage, Verification
from trtforge.verify.sensitivity import rank_linears
from trtforge.verify.stage import verify


@dataclass(frozen=True)
class Trial:
    """A checkpoint with some layers excluded: `bytes` of all its files, and its verification."""

    exclude_modules: tuple[str, ...]
    bytes: int
    verification: Verification


@dataclass(frozen=True)
class Sensitivity:
    """The linear layers by damage, the checkpoint without exclusions, and the fewest exclusions that meet the gate.

    `proposal` is None if the gate fails even with all layers excluded; `last` is that trial.
    """

    ranking: tuple[Damage, ...]
    everything: Trial
    proposal: Trial | None
    last: Trial

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "ranking": [{"modules": list(damage.modules), "error": damage.error} for damage in self.ranking],
            "without_exclusions": _trial_json(self.everything),
            "proposal": None if self.proposal is None else _trial_json(self.proposal),
        }


def analyse(
    config: CalibrateConfig,
    source: Path,
    calibration: Path,
    gate: GateConfig,
    progress: Progress | None = None,
    *,
    measured: bool = False,
) -> Sensitivity:
    """Rank the layers of `source` by the damage of quantisation, and find the fewest exclusions that meet the gate.

    `measured`: run the model with each linear layer quantised alone, instead of predicting from second moments.
    Checkpoints are written beside the calibration, one at a time, and deleted.
    """
    shown, place = progress or Silent(), calibration.resolve()
    with TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as directory:
        trials = _Trials(config, source, calibration, gate, Path(directory) / "checkpoint", shown)
        everything = trials.without(())
        if measured:
            ranking = rank_linears(trials.checkpoint, source, gate, progress=shown)
        else:
            ranking = _predicted(config, source, calibration, gate, shown)
        if everything.verification.passed:
            return Sensitivity(ranking, everything, everything, everything)
        last = trials.without(ranking)
        if not last.verification.passed:
            return Sensitivity(ranking, everything, None, last)
        fails, passes, best = 0, len(ranking), last
        while passes - fails > 1:
            middle = (fails + passes) // 2
            trial = trials.without(ranking[:middle])
            if trial.verification.passed:
                passes, best = middle, trial
            else:
                fails = middle
        return Sensitivity(ranking, everything, best, best)


def _predicted(
    config: CalibrateConfig, source: Path, calibration: Path, gate: GateConfig, progress: Progress
) -> tuple[Damage, ...]:
    found = predict_damages(calibration, source, gate, (config.format,), progress=progress)
    damages = [Damage(modules=each.modules, error=each.damage[config.format]) for each in found]
    return tuple(sorted(damages, key=lambda damage: -damage.error))


def keep(found: Sensitivity, calibration: Path) -> Path:
    """Write the ranking beside the calibration, where the next build's report finds it. Returns the file's path.

    Raises OSError if it cannot be written.
    """
    path = sensitivity_file(calibration)
    kept = {"calibration": require_manifest(calibration, "calibration").digest, **found.as_json()}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return path


class _Trials:
    def __init__(
        self,
        config: CalibrateConfig,
        source: Path,
        calibration: Path,
        gate: GateConfig,
        checkpoint: Path,
        progress: Progress,
    ) -> None:
        self.checkpoint = checkpoint
        self._config, self._source, self._calibration, self._gate = config, source, calibration, gate
        self._progress = progress

    def without(self, damages: Sequence[Damage]) -> Trial:
        """Convert and verify with these layers excluded."""
        excluded = tuple(module for damage in damages for module in damage.modules)
        settings = ConvertConfig(
            quant=self._config.format,
            kv_cache=self._config.kv_cache,
            group_size=self._config.group_size,
            exclude_modules=excluded,
        )
        made = convert(settings, self._source, self.checkpoint, calibration=self._calibration, progress=self._progress)
        found = verify(self.checkpoint, self._source, self._gate, progress=self._progress)
        return Trial(excluded, made.manifest.total_bytes, found)


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        "exclude_modules": list(trial.exclude_modules),
        "bytes": trial.bytes,
        "verification": trial.verification.as_json(),
    }
