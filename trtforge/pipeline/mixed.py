"""Floor 5: mixed precision: a format for each linear layer so that a checkpoint keeps to a budget of bits per weight.

The damage of each format to each layer is predicted once for a calibration and kept beside it, with the samples used;
choosing formats for another budget is then immediate.
"""

import json
import logging
import math
from collections.abc import Collection, Sequence
from pathlib import Path

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.json_text import read_json_object
from trtforge.core.manifest import require_manifest
from trtforge.core.progress import Progress
from trtforge.core.recipe import GateConfig, QuantFormat
from trtforge.formats.damages import Damages, Predicted
from trtforge.formats.hf import read_config
from trtforge.models.exclusions import excluded_modules
from trtforge.models.family import Facts, Family
from trtforge.models.formats import MIXED_FORMATS
from trtforge.models.registry import family_of
from trtforge.pipeline.allocation import Option, allocate, counted
from trtforge.pipeline.record import MixedRecord, read_record
from trtforge.pipeline.report_facts import beside
from trtforge.pipeline.verification import data_digest
from trtforge.plan.budget import PLAIN_BITS, bits_of, experts_problem

_LOG = logging.getLogger(__name__)


class Mixed(Config):
    """A choice. `formats`: the linear layers, by full name, whose format is not the first of MIXED_FORMATS."""

    formats: tuple[tuple[str, QuantFormat], ...]
    record: MixedRecord


def choose_formats(
    budget: float,
    source: Path,
    calibration: Path,
    gate: GateConfig,
    *,
    exclude_modules: tuple[str, ...] = (),
    progress: Progress,
) -> Mixed:
    """The formats with the least predicted damage whose weights have at most `budget` bits on average.

    `gate`: the samples to predict on. Raises UsageError for a budget that is too small, ForgeError for a calibration
    of another format and for a model with experts.
    """
    config = read_config(source)
    family = family_of(config.architecture)
    facts = family.facts(config)
    require_mixable(family, facts)
    excluded = excluded_modules(family, facts, exclude_modules)
    manifest = require_manifest(calibration, "calibration")
    found = manifest.identity.config.get("format")
    if found != MIXED_FORMATS[0]:
        raise ForgeError(
            f"{calibration} was calibrated for {found}: a budget needs {MIXED_FORMATS[0]}, whose values serve fp8 too",
            hint=f"Calibrate with --quant {MIXED_FORMATS[0]}.",
        )
    group_size = int(manifest.identity.config["group_size"])
    groups = _predicted(manifest.digest, source, calibration, gate, progress)
    weights = [group.weights for group in groups]
    options = [_options(group, group_size, excluded) for group in groups]
    allocation = allocate(options, budget * sum(weights))
    if allocation is None:
        least = sum(min(option.bits for option in each) for each in options) / sum(weights)
        raise UsageError(
            f"a budget of {budget:g} bits is too small: with {MIXED_FORMATS[0]} in groups of {group_size} wherever it "
            f"is possible, a weight has {least:.4g} bits",
            hint=f"Give a budget between {math.ceil(100 * least) / 100:g} and {PLAIN_BITS:g} bits.",
        )
    formats = zip(groups, allocation.formats, strict=True)
    return Mixed(
        formats=tuple((name, quant) for group, quant in formats if quant != MIXED_FORMATS[0] for name in group.modules),
        record=MixedRecord(
            budget=budget,
            bits=allocation.bits / sum(weights),
            weights={str(quant): count for quant, count in counted(allocation.formats, weights).items()},
            predicted_error=allocation.loss**0.5,
            least_error=allocation.bound**0.5,
            uniform_error=sum(group.damage[MIXED_FORMATS[0]] ** 2 for group in groups) ** 0.5,
        ),
    )


def recorded_choice(build: Path, budget: float | None) -> MixedRecord | None:
    """The formats chosen for `budget` by an earlier run of `build`, from its report; None if it records none."""
    try:
        record = read_record(build).mixed
    except ForgeError:
        return None
    return record if record is not None and record.budget == budget else None


def damages_file(calibration: Path) -> Path:
    """Where the predicted damage of a calibration's linear layers is kept, beside the calibration."""
    return beside(calibration, "damages")


def require_mixable(family: Family, facts: Facts) -> None:
    """Raises ForgeError for a model with experts, whose layers are not measured individually."""
    problem = experts_problem(family, facts)
    if problem is not None:
        raise ForgeError(problem.message, hint=problem.fix)


def _options(group: Predicted, group_size: int, excluded: Collection[str]) -> list[Option]:
    """The formats that a group may have; format none does no damage."""
    return [
        Option(quant, bits_of(quant, group_size) * group.weights, group.damage.get(quant, 0.0) ** 2)
        for quant in MIXED_FORMATS
        if quant == "none" or group.modules[0] not in excluded
    ]


def _predicted(
    digest: str, source: Path, calibration: Path, gate: GateConfig, progress: Progress
) -> Sequence[Predicted]:
    """The kept prediction if it belongs to this calibration and these samples, else a new one, which is kept if
    possible."""
    samples = {"data": data_digest(gate.data), "samples": gate.samples, "sequence_length": gate.sequence_length}
    path = damages_file(calibration)
    try:
        kept = Damages.parse(read_json_object(path, hint=""), str(path))
    except ForgeError:
        kept = None
    quantised = [quant for quant in MIXED_FORMATS if quant != "none"]
    same = kept is not None and (kept.calibration, kept.samples) == (digest, samples)
    if kept is not None and same and all(quant in group.damage for group in kept.groups for quant in quantised):
        return kept.groups
    from trtforge.calibrate.sensitivity import predict_damages

    groups = predict_damages(calibration, source, gate, quantised, progress=progress)
    new = Damages(calibration=digest, samples=samples, groups=groups)
    try:
        path.write_text(json.dumps(new.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        _LOG.warning("the predicted errors are not kept for the next budget: %s: %s", path, error.strerror)
    return groups
