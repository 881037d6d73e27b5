"""The tables of docs/benchmarks.md and the summary of the README, made of the record."""

import re
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.decode import BATCHES, OPENVINO, OURS
from tests.benchmarks.markdown_engine import decode, families, gpu, inflight, latency
from tests.benchmarks.markdown_parts import by_machine, table, where, wrapped
from tests.benchmarks.record import Calibrated, Calibration, Conversion, Record, Spread

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
NONE = "–"
WAYS = {
    "fp8": "`trtforge calibrate`, fp8",
    "modelopt_fp8": "ModelOpt, fp8, float32",
    "int4_awq": "`trtforge calibrate`, int4_awq, nearest",
    "int4_awq_compensated": "`trtforge calibrate`, int4_awq, compensated",
    "modelopt_int4_awq": "ModelOpt, int4_awq, float32",
    "modelopt_int4_awq_bfloat16": "ModelOpt, int4_awq, bfloat16",
}


def pages(record: Record) -> dict[Path, str]:
    """Both pages as the record wants them. Raises ValueError for a page without one of its markers."""
    page = PAGE.read_text()
    for marker, make in BLOCKS.items():
        page = _filled(page, marker, make(record))
    return {PAGE: page, README: _filled(README.read_text(), "figures", summary(record))}


def summary(record: Record) -> str:
    """The README's ten figures."""
    memory = next((model.memory for model in record.calibration if model.memory), None)
    conversion = record.conversion[0]
    copy, ours, ours_tp8, peer_tp1, peer_tp8 = conversion.ways
    quality = next(each for each in record.quality.formats if each.format == "int4_awq")  # its default rounding
    built = {each.recipe: each for each in record.quality.builds}["demo-int4awq"]
    batching = record.inflight.engines[0]
    served = record.serving.engines
    ratios = sorted(each.rate / each.rate_in_process for each in served)
    later = sorted(each.first_token_ms - each.first_token_in_process_ms for each in served)
    rows = [
        (
            f"convert {conversion.gigabytes} GB of bfloat16",
            f"{ours.seconds} s at tp 1, {ours_tp8.seconds} s at tp 8",
            f"`{copy.name}`: {copy.seconds} s; `transformers`: {peer_tp1.seconds} s and {peer_tp8.seconds} s",
        ),
        (
            "peak memory of that",
            f"{ours.peak_mb} MB",
            f"`transformers`: {max(peer_tp1.peak_mb, peer_tp8.peak_mb):,} MB",
        ),
        (
            "plan and check Llama-3.1-405B, tp 8, pp 2",
            f"{conversion.plan_405b_seconds} s",
            "reads only the headers",
        ),
        (
            "calibrate INT4-AWQ, compensated (nearest)",
            _calibrates(record, "modelopt_int4_awq", single=True),
            "ModelOpt in float32, a window at a time as TensorRT-LLM calls it",
        ),
        (
            "",
            _calibrates(record, "modelopt_int4_awq_bfloat16", single=False),
            "ModelOpt at its fastest: bfloat16, batches of 8",
        ),
        (
            "peak memory of that, 200 M model",
            f"{memory.compensated:,} ({memory.trtforge:,}) MB" if memory else NONE,
            f"ModelOpt: {_span(memory.modelopt_bfloat16)} MB in bfloat16" if memory else NONE,
        ),
        (
            "perplexity, INT4-AWQ, demo model",
            _percent(quality.increase),
            f"ModelOpt: {_percent(quality.modelopt or 0)}; groups of 64",
        ),
        (
            "size of the linears, INT4-AWQ",
            f"{built.compression:.2f} times smaller",
            f"perplexity {_percent(built.increase)}; groups of 128",
        ),
        (
            "in-flight batching, 128 requests, demo model in float32",
            f"{batching.inflight.rate:,} tokens/s",
            f"static batching: {batching.static_padded.rate:,} padded, {batching.static_dropped.rate:,} unpadded",
        ),
        *_decoded(record),
        (
            "through Triton, 32 streams",
            f"{ratios[0] * 100:.0f} to {ratios[-1] * 100:.0f} % of the engine's tokens/s",
            f"first token {later[0]} to {later[-1]} ms later",
        ),
    ]
    return table(("what", "trtforge", "compared with"), rows)


def _decoded(record: Record) -> list[tuple[str, str, str]]:
    """Rows of how many times as fast as OpenVINO the embedded engine is, each in its best format, on every machine."""
    ratios: list[list[float]] = []
    for found in record.decode:
        ours, theirs = ([way for way in found.ways if way.way in names] for names in (OURS, OPENVINO))
        if theirs:
            best = [[max(way.decode[batch] for way in ways) for batch in BATCHES] for ways in (ours, theirs)]
            prompts = [max(way.prefill for way in ways) for ways in (ours, theirs)]
            ratios.append([own / other for own, other in zip(*best, strict=True)] + [prompts[0] / prompts[1]])
    if not ratios:
        return []
    spans = [f"{min(each):.1f} to {max(each):.1f}" for each in zip(*ratios, strict=True)]
    machines = f"OpenVINO GenAI, each in its best format; {len(ratios)} machines"
    requests = ", ".join(map(str, BATCHES))
    return [
        (f"decode {requests} requests, 200 M model", f"{', '.join(spans[:-1])} times as fast", machines),
        ("prompts, same model", f"{spans[-1]} times as fast", machines),
    ]


def _serving(record: Record) -> str:
    serving = record.serving
    rows = [
        (
            each.engine,
            f"{each.rate:,} tokens/s",
            f"{each.rate_in_process:,} tokens/s",
            f"{each.rate / each.rate_in_process * 100:.0f} %",
            f"{each.first_token_ms} ms, in process {each.first_token_in_process_ms} ms",
        )
        for each in serving.engines
    ]
    more = " to ".join(dict.fromkeys(map(str, serving.more_cpu_seconds)))
    shares = " to ".join(dict.fromkeys(f"{share * 100:.0f}" for share in serving.client_share))
    notes = (
        f"Serving takes {more} s more of CPU time for 1,000 tokens than the engine alone, on another core. "
        f"The client takes {shares} % of the CPU time."
    )
    shown = table(("engine", "through Triton", "in process", "ratio", "first token, p50"), rows)
    return f"{where(serving)}{shown}\n\n{wrapped(notes)}"


def _gateway(record: Record) -> str:
    found = record.gateway
    if found is None:
        return "Not recorded yet: `python -m tests.benchmarks gateway` measures and records it."
    rows = [
        (name, f"{way.p50_ms:.2f} ms", f"{way.rate:,}")
        for name, way in (("the gateway", found.gateway), ("a bare FastAPI proxy", found.proxy))
    ]
    shown = table(("way", "a request alone, p50", "requests/s, 32 connections"), rows)
    notes = f"The gateway streams {found.events:,} events a second to 32 connections."
    return f"{where(found)}{shown}\n\n{wrapped(notes)}"


def _attacks(record: Record) -> str:
    parts = []
    for attack in record.attacks:
        columns = list(dict.fromkeys(name for row in attack.rows for name in row))
        rows = [[_cell(row.get(name, "")) for name in columns] for row in attack.rows]
        failed = f", failed: {'; '.join(attack.failed)}" if attack.failed else ", all held"
        head = f"### {attack.name[:1].upper()}{attack.name[1:]}\n\n"
        parts.append(head + where(attack, f"{attack.checks} checks{failed}. ") + table(columns, rows))
    return "\n\n".join(parts)


def _cell(figure: str | int | float) -> str:
    match figure:
        case float():
            return f"{figure:.2f}"
        case int():
            return f"{figure:,}"
        case _:
            return figure


def _conversion(record: Record) -> str:
    return by_machine("conversion", map(_converted, record.conversion))


def _converted(found: Conversion) -> str:
    rows = [(way.name, f"{way.seconds}", f"{way.times_copy:.2f}", f"{way.peak_mb:,} MB") for way in found.ways]
    return (
        where(found)
        + table((f"{found.gigabytes} GB of bfloat16", "seconds", "times the copy", "peak memory"), rows)
        + f"\n\nPlanning and checking Llama-3.1-405B at tp 8, pp 2 from its headers takes {found.plan_405b_seconds} s."
    )


def _planning(record: Record) -> str:
    if record.planning is None:
        return "Not recorded yet: `python -m tests.benchmarks planning` measures and records it."
    rows = [(f"`{each.command}`", f"{each.seconds:.2f}", f"{each.peak_mb} MB") for each in record.planning.commands]
    return where(record.planning) + table(("command", "seconds", "peak memory"), rows)


def _calibration(record: Record) -> str:
    return "\n\n".join(map(_calibrated, record.calibration))


def _calibrated(model: Calibration) -> str:
    counts = sorted({each.tokens for each in model.ways})
    found = {(each.way, each.batch, each.tokens): each for each in model.ways}
    ways = dict.fromkeys((each.way, each.batch) for each in model.ways if not each.way.startswith("forward"))
    batch = next(each.batch for each in model.ways if each.way == "forward")
    forward = (
        tuple(_seconds(found[way, batch, count].seconds) for way in ("forward", "forward_bfloat16")) for count in counts
    )
    compensated = {each.tokens: each.seconds for each in model.ways if each.way == "int4_awq_compensated"}
    rows = [("forward pass, float32 (bfloat16)", *(f"{full} ({half})" for full, half in forward))]
    for way, size in ways:
        name = WAYS[way]
        if way.startswith("modelopt_int4"):
            name += ", a window at a time" if size == 1 else f", batches of {size}"
        rows.append((name, *(_calibrated_cell(found[way, size, count], compensated[count]) for count in counts)))
    text = where(model, f"{model.model}, windows of {model.window} tokens: ")
    text += table(("seconds", *(f"{count:,} tokens" for count in counts)), rows)
    if (memory := model.memory) is not None:
        compensated = f" ({memory.compensated:,} MB compensated)" if memory.compensated else ""
        text += "\n\n" + wrapped(
            f"Peak memory of INT4-AWQ at {memory.tokens:,} tokens: {memory.trtforge:,} MB{compensated}; ModelOpt "
            f"{_span(memory.modelopt_float32)} MB in float32 and {_span(memory.modelopt_bfloat16)} MB in bfloat16."
        )
    return text


def _calibrates(record: Record, peer: str, *, single: bool) -> str:
    """How many times as fast as a peer all models are calibrated, with each rounding."""
    spans = []
    for ours in ("int4_awq_compensated", "int4_awq"):
        ratios = [
            each.times if ours == "int4_awq" and each.times is not None else each.seconds / seconds[ours, each.tokens]
            for model in record.calibration
            for seconds in [{(run.way, run.tokens): run.seconds for run in model.ways}]
            for each in model.ways
            if each.way == peer and (each.batch == 1) == single
        ]
        spans.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
    return f"{spans[0]} ({spans[1]}) times as fast"


def _calibrated_cell(each: Calibrated, compensated: float) -> str:
    """`compensated`: seconds of our calibration with compensated rounding on as many tokens."""
    notes = []
    if each.times is not None and "int4" in each.way:
        notes.append(f"{each.seconds / compensated:.1f} times ({each.times:.1f})")
    if each.passes is not None and not each.way.startswith("modelopt"):
        in_bfloat16 = "" if each.passes_bfloat16 is None else f" ({each.passes_bfloat16:.1f} in bfloat16)"
        notes.append(f"{each.passes:.2f} passes{in_bfloat16}")
    shown = _seconds(each.seconds) + (" (extrapolated)" if each.extrapolated else "")
    return ": ".join((shown, *notes))


def _builds(record: Record) -> str:
    reference = record.quality.perplexity
    rows = [
        (
            each.recipe + (f" ({each.note})" if each.note else ""),
            f"{each.perplexity:.3f}",
            _percent(each.increase),
            NONE if each.compression is None else f"{each.compression:.2f} times smaller",
        )
        for each in record.quality.builds
    ]
    head = where(record.quality, f"{record.quality.tokens:,} tokens, float32 reference {reference:.3f}: ")
    return head + table(("recipe", "perplexity", "increase", "quantised linears"), rows)


def _formats(record: Record) -> str:
    rows = [
        (
            each.format + (f", {each.rounding}" if each.rounding else ""),
            _percent(each.increase),
            NONE if each.modelopt is None else _percent(each.modelopt),
            _divergence(each.kl),
            _divergence(each.modelopt_kl),
            f"{each.top1 * 100:.2f} %",
        )
        for each in record.quality.formats
    ]
    return table(("format", "increase", "ModelOpt's", "mean KL", "ModelOpt's", "top-1 agreement"), rows)


def _domains(record: Record) -> str:
    def shown(spread: Spread, number: Callable[[float], str]) -> str:
        if spread.least == spread.most:
            return number(spread.median)
        return f"{number(spread.median)} ({number(spread.least)} to {number(spread.most)})"

    parts = []
    for model in record.domains:
        head = (
            f"{model.model[0].upper()}{model.model[1:]}, {model.calibrated:,} tokens of calibration, {model.judged:,} "
            f"judged of each kind, {model.runs} seeds: {model.machine}; {model.software}."
        )
        rows = [
            (
                each.format + (f", {each.group}" if "awq" in each.format else ""),
                each.way,
                shown(each.kl, _divergence),
                shown(each.kl_other, _divergence),
                shown(each.increase, _percent),
                shown(each.increase_other, _percent),
            )
            for each in model.ways
        ]
        columns = ("format", "way", "KL, own domain", "KL, other", "perplexity, own", "perplexity, other")
        parts.append(wrapped(head) + "\n\n" + table(columns, rows))
    return "\n\n".join(parts)


def _divergence(nats: float | None) -> str:
    return NONE if nats is None else f"{nats:.2e}"


BLOCKS = {
    "inflight": inflight,
    "serving": _serving,
    "decode": decode,
    "latency": latency,
    "families": families,
    "gpu": gpu,
    "gateway": _gateway,
    "attacks": _attacks,
    "conversion": _conversion,
    "planning": _planning,
    "calibration": _calibration,
    "builds": _builds,
    "formats": _formats,
    "domains": _domains,
}


def _filled(text: str, marker: str, content: str) -> str:
    filled, count = re.subn(
        rf"<!-- {marker} -->\n.*?<!-- end -->",
        lambda _: f"<!-- {marker} -->\n{content}\n<!-- end -->",
        text,
        flags=re.S,
    )
    if count != 1:
        raise ValueError(f"<!-- {marker} --> stands {count} times in the page, not once")
    return filled


def _percent(fraction: float) -> str:
    return f"{round(fraction * 100, 2) + 0.0:+.2f} %"  # adding 0.0 makes -0.0 positive


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:g}"


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]:,} to {span[1]:,}"
