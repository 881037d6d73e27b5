"""Floor 5: a build's report as a page for a browser and as Markdown for the summary of a CI job.

Both are made from report.json's content alone. The page needs no network and no script; the templates are beside this
module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trtforge.core import figures
from trtforge.pipeline import charts
from trtforge.pipeline.compare import Compared, conditions, notes
from trtforge.pipeline.differences import differences
from trtforge.pipeline.record import GpuRecord, QualityRecord, Record
from trtforge.pipeline.report_words import data_used, formats, layout, metrics, mixed, outcome, rounding, verdict

_PARTS = {
    "weights": "weights",
    "kv_pool": "KV pool",
    "activations": "activations",
    "logits": "logits",
    "decoder": "sampling buffers",
    "runtime": "runtime",
    "state": "linear attention",
    "lora": "LoRA adapters",
    "draft": "drafting",
}
"""Titles of the parts of a GPU's memory, in their order."""


def build_page(record: Record) -> str:
    """The report as one HTML file."""
    return _environment().get_template("report.html.j2").render(_of_page(record))


def build_markdown(record: Record) -> str:
    """The report as short tables."""
    return _markdown().get_template("report.md.j2").render(_of_page(record))


def compare_page(builds: Sequence[Compared]) -> str:
    """Several builds as one HTML file."""
    measured = [build.busiest for build in builds]
    return (
        _environment()
        .get_template("compare.html.j2")
        .render(
            builds=builds,
            charts=charts,
            conditions=conditions(builds),
            notes=notes(builds),
            differences=differences(builds),
            rates=[level and level.tokens_per_second for level in measured],
            first_texts=[level and level.first_text_ms for level in measured],
        )
    )


@dataclass(frozen=True)
class _Gpu:
    record: GpuRecord
    pieces: tuple[charts.Piece, ...]
    total: int


def _of_page(record: Record) -> dict[str, Any]:
    quality = record.verification
    return {
        "record": record,
        "verdict": verdict(quality),
        "metrics": metrics(quality, record.gate) if quality else (),
        "outcome": {stage.stage: outcome(stage, quality) for stage in record.stages},
        "time_shares": charts.shares([0.0 if stage.cached else stage.seconds for stage in record.stages]),
        "formats": formats(record.deployment) if record.deployment else None,
        "layout": layout(record.deployment) if record.deployment else None,
        "data_used": data_used(record.gate, quality.tokens if quality else None) if record.gate else None,
        "layer_errors": _layer_errors(quality),
        "output_errors": _calibrated(record, "output_error"),
        "rounding": rounding(record.rounding) if record.rounding else None,
        "mixed": mixed(record.mixed, quality) if record.mixed else None,
        "inputs": _calibrated(record, "input_amax"),
        "sensitivity": record.sensitivity[:20],
        "sensitivity_shares": charts.shares([damage.error for damage in record.sensitivity[:20]]),
        "gpus": _gpus(record),
        "parts": _PARTS,
        "curves": _curves(record),
        "settings": yaml.safe_dump(record.settings, sort_keys=False, allow_unicode=True) if record.settings else None,
        "charts": charts,
    }


def _layer_errors(quality: QualityRecord | None) -> charts.Bars | None:
    if quality is None or not quality.layers:
        return None
    values = [
        (f"layer {each.layer}: error {figures.number(each.error, 3)}, added {figures.number(each.added, 2)}",
         each.error or 0.0)
        for each in quality.layers
    ]  # fmt: skip
    worst = next((i for i, each in enumerate(quality.layers) if each.layer == quality.worst_layer), None)
    return charts.bars(values, worst)


def _calibrated(record: Record, kind: str) -> charts.Bars | None:
    """Bars of one of the calibration's figures, the largest marked."""
    found = [(each.layer, getattr(each, kind), getattr(each, f"{kind}_of")) for each in record.calibration]
    known = [(layer, value, module) for layer, value, module in found if value is not None]
    if not known:
        return None
    largest = max(range(len(known)), key=lambda index: known[index][1])
    return charts.bars([(f"layer {n}: {figures.number(value, 3)}, {of}", value) for n, value, of in known], largest)


def _gpus(record: Record) -> tuple[_Gpu, ...]:
    totals = [sum(gpu.parts.values()) for gpu in record.memory]
    found = []
    for gpu, total in zip(record.memory, totals, strict=True):
        whole = max(gpu.capacity or 0, *totals)
        parts = {part: gpu.parts[part] for part in _PARTS if part in gpu.parts}
        found.append(_Gpu(gpu, charts.stack(parts, whole), total))
    return tuple(found)


def _curves(record: Record) -> tuple[charts.Curve, ...]:
    if record.estimates is None or not record.estimates.curve:
        return ()
    points = record.estimates.curve
    return (
        charts.curve("Time to first token", "ms", [(point.concurrency, point.ttft_ms) for point in points]),
        charts.curve("Time per output token", "ms", [(point.concurrency, point.tpot_ms) for point in points]),
        charts.curve("Throughput", "tokens/s", [(point.concurrency, point.tokens_per_second) for point in points]),
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals["f"] = figures
    return environment


@cache
def _markdown() -> Environment:
    environment = Environment(  # Markdown's own special characters are escaped by the filter `cell`
        loader=FileSystemLoader(Path(__file__).parent), autoescape=False, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals["f"] = figures
    environment.filters["cell"] = markdown_cell
    return environment


def markdown_cell(value: object) -> str:
    """`value` as literal text in a table cell: markup is escaped, line breaks are removed."""
    text = " ".join(str(value).split())
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return text
