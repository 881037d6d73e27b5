"""Floor 5: the facts of a build's report: from the recipe, from the plan of its deployment, and from its artifacts."""

import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from struct import unpack

from trtforge import __version__
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.core.manifest import read_manifest
from trtforge.core.recipe import Recipe
from trtforge.formats.calibration import FILE as CALIBRATION_FILE
from trtforge.formats.shards import RowReader, StoredTensor, read_header
from trtforge.pipeline.paths import Paths
from trtforge.pipeline.record import (
    CalibratedLayer,
    DamageRecord,
    EstimatesRecord,
    Facts,
    GateRecord,
    GpuRecord,
    ModelRecord,
    PointRecord,
)
from trtforge.pipeline.report_rounding import rounding_of
from trtforge.pipeline.summary import deployment_of, light_model, model_record
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.model import Model
from trtforge.plan.planner import ESTIMATE, Plan
from trtforge.plan.request import request_of

_PARTS = ("weights", "kv_pool", "activations", "logits", "decoder", "runtime", "state", "lora", "draft")
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)\.(output_error|input_amax)$")
_FLOAT_BYTES = 4


def planned_facts(recipe: Recipe, out: Path, known: tuple[Model, Evaluation] | None = None) -> Facts:
    """The facts of a build before its first stage. `known`: the model and its evaluation, if they exist already.

    Otherwise both come from metadata on this machine; without metadata, dependent facts are None or empty.
    """
    model, evaluation = known or _evaluated(recipe)
    gate = recipe.gate
    return Facts(
        out=str(out),
        model=None if model is None else _model_record(model),
        deployment=deployment_of(recipe, model),
        gate=GateRecord.parse(gate.model_dump(mode="json"), "gate"),
        memory=() if evaluation is None else _memory(evaluation),
        estimates=None if model is None or evaluation is None else _estimates(model, evaluation),
        warnings=() if model is None or evaluation is None else (*evaluation.warnings, *model.notes),
        settings=recipe.model_dump(mode="json", exclude_defaults=True),
    )


def _model_record(model: Model) -> ModelRecord | None:
    try:
        return model_record(model)
    except ForgeError:
        return None


def _evaluated(recipe: Recipe) -> tuple[Model | None, Evaluation | None]:
    model = light_model(recipe)
    if model is None:
        return None, None
    try:
        return model, evaluate(model, request_of(recipe, model, {}))
    except ForgeError:
        return model, None


def _memory(evaluation: Evaluation) -> tuple[GpuRecord, ...]:
    """The memory of a GPU of each pipeline stage, by its use."""
    memory, gpu = evaluation.memory, evaluation.request.gpu
    if memory is None:
        return ()
    tp, stages = memory.parallel.tp, memory.stages
    return tuple(
        GpuRecord(
            name=_ranks(stage * tp, tp),
            gpus=tp,
            capacity=None if gpu is None else int(gpu.memory),
            parts={part: getattr(rank, part) for part in _PARTS if getattr(rank, part)},
        )
        for stage, rank in enumerate(stages)
    )


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def _estimates(model: Model, evaluation: Evaluation) -> EstimatesRecord | None:
    curve = Plan(model, evaluation, fixes=(), alternatives=(), fits=()).curve
    typical = evaluation.typical
    if not curve or typical is None:
        return None
    return EstimatesRecord(
        note=ESTIMATE,
        prompt=typical.prompt,
        output=typical.output,
        curve=tuple(
            PointRecord(
                concurrency=point.concurrency,
                ttft_ms=round(1e3 * point.ttft, 2),
                tpot_ms=round(1e3 * point.tpot, 2),
                tokens_per_second=round(point.tokens_per_second, 1),
            )
            for point in curve
        ),
    )


def with_artifacts(facts: Facts, paths: Paths, artifacts: Sequence[str], finished: str) -> Facts:
    """`facts` and those read from the build's artifacts; `artifacts`: those of this run."""
    versions = {"trtforge": __version__, "python": platform.python_version()}
    for artifact in artifacts:
        manifest = read_manifest(Path(artifact))
        versions |= manifest.identity.versions if manifest is not None else {}
    engine = read_manifest(paths.engine) if {str(paths.engine), str(paths.repository)} & set(artifacts) else None
    found: dict[str, object] = {"versions": versions, "finished": finished}
    found["engine_bytes"] = None if engine is None else engine.total_bytes
    with suppress(ForgeError):  # the calibration of an earlier run may be damaged; this run did not need it
        if str(paths.calibration) in artifacts or _belongs(paths):
            found["calibration"] = calibrated_layers(paths.calibration)
            found["rounding"], warnings = rounding_of(paths.calibration)
            found["warnings"] = (*facts.warnings, *warnings)
            found["sensitivity"] = _sensitivity(paths.calibration)
    return facts.model_copy(update=found)


def _belongs(paths: Paths) -> bool:
    """Whether the calibration is the one that the checkpoint was made with."""
    checkpoint, calibration = read_manifest(paths.checkpoint), read_manifest(paths.calibration)
    return (
        checkpoint is not None and calibration is not None and calibration.digest in checkpoint.identity.inputs.values()
    )


def calibrated_layers(calibration: Path) -> tuple[CalibratedLayer, ...]:
    """The largest error and the largest input of each decoder layer. Reads single numbers, no torch."""
    path = calibration / CALIBRATION_FILE
    if not path.is_file():
        return ()
    layers: dict[int, dict[str, tuple[float, str]]] = {}
    with RowReader() as reader:
        for tensor in read_header(path):
            found = _IN_LAYER.search(tensor.spec.name)
            if found is None or tensor.spec.nbytes != _FLOAT_BYTES:
                continue
            layer, module, kind = int(found[1]), found[2], found[3]
            value, largest = _number(reader, tensor), layers.setdefault(layer, {})
            if kind not in largest or value > largest[kind][0]:
                largest[kind] = (value, module)
    return tuple(_layer(layer, layers[layer]) for layer in sorted(layers))


def _layer(layer: int, largest: Mapping[str, tuple[float, str]]) -> CalibratedLayer:
    fields: dict[str, object] = {}
    for kind, (value, module) in largest.items():
        fields |= {kind: value, f"{kind}_of": module}
    return CalibratedLayer.parse({"layer": layer, **fields}, CALIBRATION_FILE)


def _number(reader: RowReader, tensor: StoredTensor) -> float:
    value: float = unpack("<f", reader.read_bytes(tensor, 0, memoryview(bytearray(_FLOAT_BYTES))))[0]
    return value


def sensitivity_file(calibration: Path) -> Path:
    """Where the ranking of a calibration's linear layers is kept, beside the calibration."""
    return beside(calibration, "sensitivity")


def beside(calibration: Path, what: str) -> Path:
    """A file beside a calibration, named after it."""
    calibration = calibration.resolve()  # `.` has no name
    return calibration.with_name(f"{calibration.name}-{what}.json")


def _sensitivity(calibration: Path) -> tuple[DamageRecord, ...]:
    """The kept ranking if it belongs to this calibration."""
    path, manifest = sensitivity_file(calibration), read_manifest(calibration)
    if manifest is None or not path.is_file():
        return ()
    kept = read_json_object(path, hint=f"Delete {path}.")
    if kept.get("calibration") != manifest.digest or not isinstance(kept.get("ranking"), list):
        return ()
    return tuple(DamageRecord.parse(damage, str(path)) for damage in kept["ranking"])
