"""Floor 5: the content of report.json, to write and to read. Fields that older versions did not write are None or
empty."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import Field

from trtforge.core.builds import REPORT_FILE, require_one_build
from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError, mistyped
from trtforge.core.json_text import read_json_object
from trtforge.core.nearest import nearest_path
from trtforge.core.recipe import RoundingMethod
from trtforge.pipeline.stages import StageName


class _Part(Config, extra="ignore", allow_inf_nan=False):
    """A part of the report; keys of newer versions are ignored. Numbers are finite."""


class StageRecord(_Part):
    """One stage, as `pipeline.report.StageReport`."""

    stage: StageName
    artifact: str | None
    bytes: int
    seconds: float
    peak_memory: int
    cached: bool
    origin: str = ""


class PerplexityRecord(_Part):
    """Perplexities and their relative difference; None for NaN and infinity. Confidence intervals of 95 %."""

    reference: float | None
    candidate: float | None
    increase: float | None
    increase_interval: tuple[float, float] | None = None


class LayerRecord(_Part):
    """The relative error after a decoder layer, and the error that this layer adds."""

    layer: int
    error: float | None
    added: float | None


class QualityRecord(_Part):
    """The metrics of a verification."""

    passed: bool
    perplexity: PerplexityRecord
    kl_mean: float | None
    kl_mean_interval: tuple[float, float] | None = None
    kl_p99: float | None = None
    kl_p99_interval: tuple[float, float] | None = None
    top1_agreement: float
    max_abs_logit_error: float | None
    tokens: int
    tensors_checked: int
    failures: tuple[str, ...] = ()
    layers: tuple[LayerRecord, ...] = ()
    worst_layer: int | None = None


class ModelRecord(_Part):
    """The model. `source_bytes`: of its weight files, or computed from its dtype if they are not on this machine."""

    name: str
    family: str
    parameters: int
    source_bytes: int


class DeploymentRecord(_Part):
    """Formats, layout and hardware. `dtype`: of the weights that stay unquantised; None if the model is unknown."""

    quant: str
    group_size: int | None
    kv_cache: str
    dtype: str | None
    tp: int
    pp: int
    ep: int
    hardware: str


class GateRecord(_Part):
    """Limits and data of the quality gate."""

    perplexity_increase: float | None
    top1_agreement: float | None
    kl_mean: float | None
    kl_p99: float | None = None
    data: str
    samples: int
    sequence_length: int


class GpuRecord(_Part):
    """Planned bytes on each of `gpus` GPUs, by their use. `capacity`: of a GPU; None if no GPU is named."""

    name: str
    gpus: int
    capacity: int | None
    parts: dict[str, int]


class PointRecord(_Part):
    """Estimates for a number of concurrent requests."""

    concurrency: int = Field(ge=1)
    ttft_ms: float
    tpot_ms: float
    tokens_per_second: float


class EstimatesRecord(_Part):
    """The plan's estimates for requests of `prompt` and `output` tokens."""

    note: str
    prompt: int
    output: int
    curve: tuple[PointRecord, ...]


class CalibratedLayer(_Part):
    """A decoder layer in the calibration: the largest values of its linear layers, and the names of these layers.

    `output_error`: AWQ's, relative to the output's energy. `input_amax`: largest magnitude of an input.
    """

    layer: int
    output_error: float | None = None
    output_error_of: str | None = None
    input_amax: float | None = None
    input_amax_of: str | None = None


class RoundingRecord(_Part):
    """How a calibration rounded weights. `compensated` and `nearest`: numbers of linear layers.

    `error_left`: mean of the compensated layers' output error / that of rounding to the nearest. `fewest_tokens`: the
    smallest number of tokens of the data that reached a layer.
    """

    method: RoundingMethod
    compensated: int = 0
    nearest: int = 0
    error_left: float | None = None
    fewest_tokens: int | None = None


class MixedRecord(_Part):
    """Mixed precision: `budget` and chosen `bits` of a weight on average, `weights` by format.

    Errors of the decoder's output relative to its norm: `predicted_error` of the choice, `uniform_error` with all
    layers in the smallest format, and `least_error`, a lower bound for any choice within the budget.
    """

    budget: float
    bits: float
    weights: dict[str, int]
    predicted_error: float
    least_error: float
    uniform_error: float


class DamageRecord(_Part):
    """The error of a decoder layer's output if only these linear layers are quantised."""

    modules: tuple[str, ...]
    error: float


class Facts(_Part):
    """The report's content besides stages and metrics; None or empty if unknown.

    `settings`: the recipe's keys that differ from the defaults. `finished`: ISO 8601, of the build's last stage.
    """

    out: str | None = None
    model: ModelRecord | None = None
    deployment: DeploymentRecord | None = None
    gate: GateRecord | None = None
    memory: tuple[GpuRecord, ...] = ()
    estimates: EstimatesRecord | None = None
    engine_bytes: int | None = None
    calibration: tuple[CalibratedLayer, ...] = ()
    rounding: RoundingRecord | None = None
    mixed: MixedRecord | None = None
    sensitivity: tuple[DamageRecord, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    settings: dict[str, Any] = Field(default_factory=dict)
    finished: str | None = None


class Record(Facts):
    """A build's report.json."""

    recipe: str
    stages: tuple[StageRecord, ...]
    verification: QualityRecord | None
    compression: float | None
    next: str

    def stage(self, name: StageName) -> StageRecord | None:
        """One stage of this run; None if the run did not include it."""
        return next((stage for stage in self.stages if stage.stage == name), None)

    @property
    def measured_earlier(self) -> bool:
        """Whether the metrics are those of an earlier run."""
        stage = self.stage("verify")
        return self.verification is not None and (stage is None or stage.cached)

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def smaller(self) -> float | None:
        """Bytes of the model's files / bytes of the engine."""
        if self.model is None or not self.engine_bytes:
            return None
        return self.model.source_bytes / self.engine_bytes


def read_record(build: Path, others: Collection[Path] = ()) -> Record:
    """The report of a build directory, or a report.json. Raises ForgeError if it is missing or damaged.

    `others`: the other builds on the command line, which the hint does not propose.
    """
    give = "Give the directory that `trtforge build` wrote, such as build/demo-int4awq."
    if not build.exists():
        near = nearest_path(build, lambda each: each.is_dir() and each not in others)
        raise mistyped(f"{build}: no such directory", str(build), near, otherwise=give)
    require_one_build(build)
    path = build / REPORT_FILE if build.is_dir() else build
    if not path.is_file():
        raise ForgeError(f"{build} has no {REPORT_FILE}: not a build directory", hint=give)
    return Record.parse(read_json_object(path, hint="Build again to write the report."), str(path))
