"""Floor 5: run a recipe as ordered stages; a stage is skipped if its artifact is up to date."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import join, quote

from trtforge.calibrate.stage import calibrate
from trtforge.compile.llmapi import plan_for_hf_config
from trtforge.compile.stage import (
    CompileOptions,
    EnginePlan,
    compile_engine,
    engine_plan_for,
    require_buildable,
    warnings_of,
)
from trtforge.convert.stage import ConvertConfig, convert, layout_for
from trtforge.core.artifact import Produced
from trtforge.core.errors import ForgeError
from trtforge.core.locks import locked_by
from trtforge.core.manifest import Stage
from trtforge.core.operands import operand
from trtforge.core.output_place import not_lockable, require_output
from trtforge.core.parallel import Parallel
from trtforge.core.progress import Progress
from trtforge.core.recipe import Recipe
from trtforge.formats.hf import resolve_source
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.machine.usage import measured
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.drafting_plan import planned_drafting
from trtforge.models.exclusions import inseparable
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.package.target import PackageTarget
from trtforge.pipeline.continuation import require_calibration_of, require_checkpoint_of, require_engine_of
from trtforge.pipeline.diagnosis import diagnosis_command, ways_to_quality
from trtforge.pipeline.metrics import METRICS_FILE, CheckpointMetrics
from trtforge.pipeline.mixed import choose_formats, recorded_choice
from trtforge.pipeline.paths import Paths
from trtforge.pipeline.preflight import Preflight, preflight, require_files, warn_of_verification
from trtforge.pipeline.report import BuildReport, StageReport, weight_compression, write_failure, write_report
from trtforge.pipeline.report_facts import planned_facts
from trtforge.pipeline.stage_configs import calibrate_config, convert_config, converted_drafting
from trtforge.pipeline.stages import STAGES, StageName, needs_calibration, of_published, of_quantized
from trtforge.pipeline.summary import is_quantized, light_model
from trtforge.pipeline.verification import known_metrics, verified
from trtforge.plan.model import Model
from trtforge.plan.published import served_as_published

_SOURCE_STAGES = frozenset({"calibrate", "convert", "verify"})
"""The stages that read the Hugging Face checkpoint; the later stages read their artifacts."""

Started = Callable[[StageName], None]
Finished = Callable[[StageReport], None]
_LOCK = ".build.lock"
_LOG = logging.getLogger(__name__)


@dataclass
class Build:
    """One run of a recipe. `named`: the recipe and its overrides as given on the command line."""

    recipe: Recipe
    out: Path
    progress: Progress
    force: bool = False
    named: str = ""
    options: CompileOptions = field(default_factory=CompileOptions)
    paths: Paths = field(init=False)
    _source: Path | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.paths = Paths(self.out)

    def run(
        self, stages: tuple[StageName, ...], started: Started, finished: Finished = lambda stage: None
    ) -> BuildReport:
        """Run the stages in order. Raises ForgeError at the first that fails; earlier artifacts are kept.

        A recipe that cannot be deployed, whose data cannot be read, or whose results cannot be written is refused
        before the first stage. `report.json` is written even if the gate fails, as it has the metrics; after any other
        error, `report.md` says that the build failed. Of several processes that build in the same directory, one runs
        its stages while the others wait.
        """
        report = BuildReport(
            recipe=self.recipe.name,
            next_command=next_command(self.named or quote(self.recipe.name), self.paths, stages),
        )
        try:
            self._require_places(stages)
            with report.collecting_warnings():
                judged, stages = self._preflight(stages)
            known = None if judged is None else (judged.model, judged.evaluation)
            report.facts = planned_facts(self.recipe, self.out, known)
            with _alone(self.out):
                self._run(stages, report, started, finished)
        except GateError:
            raise
        except BaseException as error:
            write_failure(self.paths.report, self.recipe.name, error)
            raise
        return report

    def _run(self, stages: tuple[StageName, ...], report: BuildReport, started: Started, finished: Finished) -> None:
        """The part of `run` that needs the directory's lock, because it reads and writes artifacts."""
        self._require_continuable(stages, report)
        if "convert" not in stages:
            earlier = recorded_choice(self.out, self.recipe.quantization.budget)
            report.facts = report.facts.model_copy(update={"mixed": earlier})
        for stage in stages:
            started(stage)
            with _log_interruption(stage, report), report.collecting_warnings(), measured() as usage:
                result = self._stage(stage, report)
            if result is not None:
                report.stages.append(StageReport.of(stage, result, usage))
            finished(report.stages[-1])
        self._carry_over(stages, report)
        write_report(self.paths.report, report)

    def _require_places(self, stages: tuple[StageName, ...]) -> None:
        """Raise ForgeError if the stages cannot write their artifacts or replace existing ones."""
        places: dict[StageName, tuple[Path, Stage]] = {
            "calibrate": (self.paths.calibration, "calibration"),
            "convert": (self.paths.checkpoint, "checkpoint"),
            "verify": (self.paths.verification, "verification"),
            "compile": (self.paths.engine, "engine"),
            "package": (self.paths.repository, "repository"),
        }
        for stage in stages:
            require_output(*places[stage])

    def _preflight(self, stages: tuple[StageName, ...]) -> tuple[Preflight | None, tuple[StageName, ...]]:
        """Check what the stages need before the first one starts, and log the warnings of their plan.

        Returns the recipe's deployment, None if no stage reads the Hugging Face checkpoint, and the stages that apply
        to the model. Raises ForgeError as `run` does.
        """
        judged = None
        if not _SOURCE_STAGES.isdisjoint(stages):
            judged = preflight(self.recipe)
            if judged.model.stored is not None:
                stages = of_quantized(self.recipe, stages)
            warnings = [*judged.evaluation.warnings, *judged.model.notes]
            if "compile" in stages:
                plan = planned_engine(self.recipe, judged.model, self.paths, self.options)
                require_buildable(plan)
                warnings += warnings_of(plan)
            for warning in dict.fromkeys(warnings):
                _LOG.warning(warning)
            if "verify" in stages:
                warn_of_verification(judged)
        require_files(self.recipe, stages)
        if self.published:
            same_weights = judged is not None and judged.model.config.mxfp4_experts
            stages = of_published(self.recipe, stages, same_weights=same_weights)
        return judged, stages

    def _stage(self, stage: StageName, report: BuildReport) -> Produced | None:
        recipe, paths = self.recipe, self.paths
        match stage:
            case "calibrate":
                config = calibrate_config(recipe)
                return calibrate(config, self.source, paths.calibration, force=self.force, progress=self.progress)
            case "convert":
                calibration = paths.calibration if self.calibrated else None
                return convert(
                    self._convert_config(report),
                    self.source,
                    paths.checkpoint,
                    calibration=calibration,
                    drafting=converted_drafting(recipe),
                    force=self.force,
                    progress=self.progress,
                )
            case "verify":
                self._verify(report)
                return None
            case "compile":
                return compile_engine(
                    recipe.engine,
                    self.source if self.published else paths.checkpoint,
                    paths.engine,
                    options_for(recipe, self.options) if self.published else self.options,
                    force=self.force,
                    progress=self.progress,
                    warn=lambda warning: None if warning in report.warnings else _LOG.warning(warning),
                )
            case "package":
                built_for = recipe.engine.target
                target = PackageTarget(tensorrt_llm=built_for.tensorrt_llm, gpu=built_for.gpu)
                packaging = PackageConfig(serving=recipe.serving, target=target)
                return package(packaging, paths.engine, None, paths.repository, force=self.force)

    def _convert_config(self, report: BuildReport) -> ConvertConfig:
        """The configuration of conversion. With a budget of bits, this chooses the formats of the linear layers."""
        config, budget = convert_config(self.recipe), self.recipe.quantization.budget
        if budget is None:
            return config
        mixed = choose_formats(
            budget,
            self.source,
            self.paths.calibration,
            self.recipe.gate,
            exclude_modules=config.exclude_modules,
            progress=self.progress,
        )
        report.facts = report.facts.model_copy(update={"mixed": mixed.record})
        return config.model_copy(update={"formats": mixed.formats})

    @property
    def source(self) -> Path:
        """The Hugging Face checkpoint's directory, fetched once."""
        if self._source is None:
            self._source = resolve_source(self.recipe.model.source, self.recipe.model.revision)
        return self._source

    @property
    def calibrated(self) -> bool:
        """Whether conversion needs a calibration."""
        return needs_calibration(self.recipe, quantized=is_quantized(self.recipe))

    @property
    def published(self) -> bool:
        """Whether the model is served as it was published; False if its config.json is unknown on this machine."""
        model = light_model(self.recipe)
        return model is not None and is_published(self.recipe, model)

    def _require_continuable(self, stages: tuple[StageName, ...], report: BuildReport) -> None:
        """Raise ForgeError if the existing artifacts are not the recipe's or are known to fail the gate.

        Writes nothing: the report of the earlier run remains.
        """
        match stages[0]:
            case "convert" if self.calibrated:
                require_calibration_of(self.recipe, self.paths.calibration)
            case "compile" if self.published:
                return
            case "verify" | "compile":
                require_checkpoint_of(self.recipe, self.paths.checkpoint, self.paths.calibration)
            case "package":
                require_engine_of(self.paths.checkpoint, self.paths.engine)
        if stages[0] in ("compile", "package"):
            known = self._known_metrics()
            if known is not None:
                failed = replace(report, verification=known.verification, compression=known.compression)
                error = self._gate_error(failed, self.paths.verification / METRICS_FILE)
                if error is not None:
                    raise error

    def _known_metrics(self) -> CheckpointMetrics | None:
        """The metrics that an earlier run found for the current checkpoint with this gate."""
        return known_metrics(self.paths.checkpoint, self.recipe.gate, self.paths.verification)

    def _carry_over(self, stages: tuple[StageName, ...], report: BuildReport) -> None:
        """Add the metrics of the checkpoint that this run started from, or made."""
        if report.verification is not None or stages == ("calibrate",):
            return
        known = self._known_metrics()
        if known is not None:
            report.verification, report.compression = known.verification, known.compression
        elif stages != ("package",) and not self.published:
            report.compression = weight_compression(self.paths.checkpoint)

    def _verify(self, report: BuildReport) -> None:
        """Verify, or take the metrics of an earlier run if checkpoint and gate are the same."""
        paths = self.paths
        with measured() as usage:
            metrics, origin = verified(
                paths.checkpoint,
                lambda: self.source,
                self.recipe.gate,
                paths.verification,
                force=self.force,
                progress=self.progress,
            )
        report.verification, report.compression = metrics.verification, metrics.compression
        report.stages.append(StageReport.of_verification(usage, origin))
        error = self._gate_error(report, paths.report)
        write_report(paths.report, report)
        if error is not None:
            raise error

    def _gate_error(self, report: BuildReport, metrics: Path) -> "GateError | None":
        """The error of a failed gate, None if it holds; sets the report's next command to the one that finds the cause.

        `metrics`: the file with the metrics.
        """
        if report.verification is None or report.verification.passed:
            return None
        quantized = is_quantized(self.recipe)
        report.next_command = diagnosis_command(self.recipe, self.paths, quantized=quantized)
        broken = "; ".join(str(failure) for failure in report.verification.failures)
        return GateError(
            f"the quality gate failed: {broken}",
            hint=f"Use {ways_to_quality(self.recipe, quantized=quantized)}. Find the cause: `{report.next_command}`. "
            f"The metrics are in {metrics}.",
            report=report,
        )


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the lock of the build directory `out`, so that no other build changes its artifacts."""
    place = out.resolve()
    new = not place.exists()
    with ExitStack() as held:
        if new:
            held.callback(_remove_empty, place)
        try:
            place.mkdir(parents=True, exist_ok=True)
            waiting = partial(_LOG.warning, "another process is building %s: waiting for it", out)
            held.enter_context(locked_by(place / _LOCK, waiting=waiting))
        except OSError as error:
            raise not_lockable(out, error) from None
        yield


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):  # it is not empty
        directory.rmdir()


@contextmanager
def _log_interruption(stage: StageName, report: BuildReport) -> Iterator[None]:
    """Log the stage in which an interruption happened, and the stages that are complete."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        complete = ", ".join(done.stage for done in report.stages)
        kept = f"complete and kept: {complete}" if complete else "no stage is complete"
        _LOG.warning("the build of %s was interrupted in stage %s; %s", report.recipe, stage, kept)
        raise


class GateError(ForgeError):
    """The quality gate failed; `report` has the metrics."""

    def __init__(self, message: str, *, hint: str, report: BuildReport) -> None:
        super().__init__(message, hint=hint)
        self.report = report


def planned_checkpoint(recipe: Recipe, model: Model) -> tuple[Layout, CheckpointConfig]:
    """The layout and config.json of a recipe's checkpoint, from the model's metadata."""
    layout = layout_for(convert_config(recipe), model.config)
    if recipe.quantization.budget is not None:  # which layers get another format is not known yet
        first = next(iter(inseparable(model.family, model.facts)))[0]
        layout = replace(layout, formats=((first, layout.quant),))
    checkpoint = checkpoint_config(model.family, model.facts, model.config.architecture, layout)
    drafting = converted_drafting(recipe)
    return layout, checkpoint if drafting is None else planned_drafting(checkpoint, model.config, drafting)


def is_published(recipe: Recipe, model: Model) -> bool:
    """Whether the recipe serves its model as it was published."""
    return served_as_published(model.config, recipe.engine.backend, recipe.quantization.format)


def options_for(recipe: Recipe, options: CompileOptions) -> CompileOptions:
    """The options for a model that is served as it was published: its layout and KV cache come from the recipe."""
    parallel = Parallel(recipe.parallel.tp, recipe.parallel.pp, recipe.parallel.ep)
    return replace(options, parallel=parallel, fp8_cache=recipe.quantization.kv_cache == "fp8")


def planned_engine(recipe: Recipe, model: Model, paths: Paths, options: CompileOptions) -> EnginePlan:
    """The plan of the recipe's compile stage, from the model's metadata."""
    if is_published(recipe, model):
        options = options_for(recipe, options)
        assert options.parallel is not None
        return plan_for_hf_config(model.config, options.parallel, recipe.engine, fp8_cache=options.fp8_cache)
    _, checkpoint = planned_checkpoint(recipe, model)
    return engine_plan_for(checkpoint, recipe.engine, paths.checkpoint, paths.engine, options)


def next_command(named: str, paths: Paths, stages: tuple[StageName, ...]) -> str:
    """The command that follows these stages. `named`: the recipe as given on the command line, quoted for a shell."""
    if stages[-1] == STAGES[-1]:
        return join(["trtforge", "serve", operand(paths.repository)])
    following = STAGES[STAGES.index(stages[-1]) + 1]
    return f"trtforge build {named} {join(['--out', str(paths.out), '--from', following])}"
