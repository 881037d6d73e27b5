"""Floor 5: a recipe becomes ordered stages; each is skipped when its artifact is already right."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from trtforge import __version__
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.compile.stage import CompileOptions, compile_engine, plan_for, require_buildable
from trtforge.convert.stage import ConvertConfig, convert, layout_for
from trtforge.core.artifact import Produced
from trtforge.core.digest import file_digest, text_digest
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.manifest import Manifest, open_artifact, read_manifest
from trtforge.core.progress import Progress
from trtforge.core.recipe import GateConfig, Recipe
from trtforge.core.usage import measured
from trtforge.formats.corpus import require_data
from trtforge.formats.hf import resolve_source
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.formats import FORMATS
from trtforge.models.plan import Layout
from trtforge.package.models import PackageConfig
from trtforge.package.stage import package
from trtforge.package.target import PackageTarget
from trtforge.plan.formats import CACHES
from trtforge.plan.model import Model
from trtforge.preflight import preflight, warn_of_verification
from trtforge.report import BuildReport, StageReport, read_verification, weight_compression, write_report
from trtforge.verify.result import Verification
from trtforge.verify.stage import verify

StageName = Literal["calibrate", "convert", "verify", "compile", "package"]
STAGES: tuple[StageName, ...] = get_args(StageName)
REPORT_FILE = "report.json"
_OF_THE_SOURCE = frozenset({"calibrate", "convert", "verify"})
"""The stages that read the Hugging Face checkpoint: later ones judge what those made."""

Started = Callable[[StageName], None]


@dataclass(frozen=True)
class Paths:
    """Where a build puts its artifacts."""

    out: Path

    @property
    def calibration(self) -> Path:
        """Measured activations; absent for formats that need none."""
        return self.out / "calibration"

    @property
    def checkpoint(self) -> Path:
        """The TensorRT-LLM checkpoint."""
        return self.out / "checkpoint"

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
        """What the build made and how good it is."""
        return self.out / REPORT_FILE


def selected(recipe: Recipe, first: StageName, last: StageName) -> tuple[StageName, ...]:
    """The stages from `first` to `last` that this recipe has. Raises ForgeError for an empty selection."""
    if STAGES.index(first) > STAGES.index(last):
        raise UsageError(f"--from {first} comes after --to {last}", hint=f"Stages go {', '.join(STAGES)}.")
    stages = STAGES[STAGES.index(first) : STAGES.index(last) + 1]
    chosen = tuple(stage for stage in stages if stage != "calibrate" or needs_calibration(recipe))
    if not chosen:
        raise ForgeError(f"{recipe.name} needs no calibration", hint="Use --to convert.")
    return chosen


def needs_calibration(recipe: Recipe) -> bool:
    """Whether the weights' format or the KV cache's has scales that data decides."""
    quant = recipe.quantization
    return FORMATS[quant.format].calibrated or CACHES[quant.kv_cache].calibrated


@dataclass
class Build:
    """One run of a recipe. `named`: the recipe and its overrides as the command line had them."""

    recipe: Recipe
    out: Path
    progress: Progress
    force: bool = False
    named: str = ""
    options: CompileOptions = field(default_factory=CompileOptions)
    paths: Paths = field(init=False)
    _source: Path | None = field(init=False, default=None)
    _verified: dict[str, Verification] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = Paths(self.out)

    def run(self, stages: tuple[StageName, ...], started: Started) -> BuildReport:
        """Run the stages in order. Raises ForgeError at the first that fails; the artifacts before it stay.

        A recipe that cannot be deployed, or whose data cannot be read, is refused before the first of them.
        The report is written to `report.json` also when the gate does not hold, so that the figures can be read.
        """
        if not _OF_THE_SOURCE.isdisjoint(stages):
            judged = preflight(self.recipe)
            if "compile" in stages:
                _, checkpoint = planned_checkpoint(self.recipe, judged.model)
                paths, engine = self.paths, self.recipe.engine
                require_buildable(plan_for(checkpoint, engine, paths.checkpoint, paths.engine, self.options))
            if "verify" in stages:
                warn_of_verification(judged)
        if "calibrate" in stages:
            require_data(self.recipe.quantization.calibration.data)
        if "verify" in stages:
            require_data(self.recipe.gate.data)
        report = BuildReport(
            recipe=self.recipe.name, next_command=next_command(self.named or self.recipe.name, self.paths, stages)
        )
        self._verified = read_verification(self.paths.report)
        for stage in stages:
            started(stage)
            with measured() as usage:
                result = self._stage(stage, report)
            if result is not None:
                report.stages.append(StageReport.of(stage, result, usage))
            self._finish(stage, report)
        self._carry_over(stages, report)
        write_report(self.paths.report, report)
        return report

    def _stage(self, stage: StageName, report: BuildReport) -> Produced | None:
        recipe, paths, quant = self.recipe, self.paths, self.recipe.quantization
        match stage:
            case "calibrate":
                config = CalibrateConfig.parse(
                    {
                        "format": quant.format if FORMATS[quant.format].calibrated else "none",
                        "awq_clip": quant.awq_clip,
                        "memory": quant.memory,
                        "kv_cache": quant.kv_cache,
                        "group_size": quant.group_size,
                        "data": quant.calibration,
                        "device": recipe.engine.device,
                    },
                    "quantization",
                )
                return calibrate(config, self.source, paths.calibration, force=self.force, progress=self.progress)
            case "convert":
                calibration = paths.calibration if needs_calibration(recipe) else None
                return convert(
                    convert_config(recipe),
                    self.source,
                    paths.checkpoint,
                    calibration=calibration,
                    force=self.force,
                    progress=self.progress,
                )
            case "verify":
                self._verify(report)
                return None
            case "compile":
                return compile_engine(
                    recipe.engine,
                    paths.checkpoint,
                    paths.engine,
                    self.options,
                    force=self.force,
                    progress=self.progress,
                )
            case "package":
                built_for = recipe.engine.target
                target = PackageTarget(tensorrt_llm=built_for.tensorrt_llm, gpu=built_for.gpu)
                packaging = PackageConfig(serving=recipe.serving, target=target)
                return package(packaging, paths.engine, None, paths.repository, force=self.force)

    @property
    def source(self) -> Path:
        """The Hugging Face checkpoint's directory, fetched once."""
        if self._source is None:
            self._source = resolve_source(self.recipe.model.source, self.recipe.model.revision)
        return self._source

    def _carry_over(self, stages: tuple[StageName, ...], report: BuildReport) -> None:
        """The figures of the checkpoint that this run goes on from: what an earlier one verified, and its size."""
        checkpoint = read_manifest(self.paths.checkpoint)
        if checkpoint is None or not self._uses(checkpoint, stages):
            return
        report.compression = weight_compression(self.paths.checkpoint)
        key = _verification_key(checkpoint.digest, self.recipe.gate)
        if report.verification is None and key in self._verified:
            report.verification, report.verification_key = self._verified[key], key

    def _uses(self, checkpoint: Manifest, stages: tuple[StageName, ...]) -> bool:
        """Whether what these stages make is of the checkpoint that is there."""
        if stages == ("package",):
            engine = read_manifest(self.paths.engine)
            return engine is not None and engine.identity.inputs.get("checkpoint") == checkpoint.digest
        return stages != ("calibrate",)

    def _verify(self, report: BuildReport) -> None:
        """Verify, or take the figures of the last report if checkpoint and gate are the same."""
        checkpoint = open_artifact(self.paths.checkpoint, "checkpoint")
        key = _verification_key(checkpoint.digest, self.recipe.gate)
        known = self._verified.get(key) if not self.force else None
        with measured() as usage:
            result = known or verify(self.paths.checkpoint, self.source, self.recipe.gate, progress=self.progress)
        report.verification, report.verification_key = result, key
        report.stages.append(StageReport.of_verification(result, usage, cached=known is not None))

    def _finish(self, stage: StageName, report: BuildReport) -> None:
        """What follows from a stage that is done; stop where the gate does not hold."""
        if stage == "verify":
            report.compression = weight_compression(self.paths.checkpoint)
            write_report(self.paths.report, report)
        if stage == "verify" and report.verification is not None and not report.verification.passed:
            broken = "; ".join(str(failure) for failure in report.verification.failures)
            raise GateError(
                f"the quality gate does not hold: {broken}",
                hint=f"Use {_ways_to_quality(self.recipe)}; the figures are in {self.paths.report}.",
                report=report,
            )


def _ways_to_quality(recipe: Recipe) -> str:
    if not FORMATS[recipe.quantization.format].calibrated:
        return "another format, or leave layers out (quantization.exclude_modules)"
    return (
        "more or better calibration data, another format, or leave out the layers that "
        "`trtforge calibrate --sensitivity` finds"
    )


class GateError(ForgeError):
    """The gate does not hold; `report` has the figures."""

    def __init__(self, message: str, *, hint: str, report: BuildReport) -> None:
        super().__init__(message, hint=hint)
        self.report = report


def _verification_key(checkpoint: str, gate: GateConfig) -> str:
    """What decides a verification: the checkpoint, the gate, the content of its data and who computes."""
    data = Path(gate.data)
    content = file_digest(data) if data.is_file() else platform.python_version()
    return text_digest("/".join((checkpoint, gate.model_dump_json(), content, version("transformers"), __version__)))


def convert_config(recipe: Recipe) -> ConvertConfig:
    """The convert stage's configuration of a recipe."""
    quant = recipe.quantization
    return ConvertConfig(
        tp=recipe.parallel.tp,
        pp=recipe.parallel.pp,
        ep=recipe.parallel.ep,
        dtype=recipe.model.dtype,
        quant=quant.format,
        kv_cache=quant.kv_cache,
        group_size=quant.group_size,
        exclude_modules=quant.exclude_modules,
        shared_pre_quant_scale=recipe.engine.backend == "llmapi" and FORMATS[quant.format].smoothing == "awq",
    )


def planned_checkpoint(recipe: Recipe, model: Model) -> tuple[Layout, CheckpointConfig]:
    """How conversion will write the checkpoint of a recipe, and its config.json, from the model's metadata."""
    layout = layout_for(convert_config(recipe), model.config)
    return layout, checkpoint_config(model.family, model.facts, model.config.architecture, layout)


def next_command(named: str, paths: Paths, stages: tuple[StageName, ...]) -> str:
    """What a user types after these stages of the recipe that was `named` so."""
    if stages[-1] == STAGES[-1]:
        return f"trtforge serve {paths.repository}"
    following = STAGES[STAGES.index(stages[-1]) + 1]
    return f"trtforge build {named} --out {paths.out} --from {following}"
